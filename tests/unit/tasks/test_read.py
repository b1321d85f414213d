import json
from pathlib import Path

import pytest

from coterie.errors import DataError, MissingPackageError, RecipeError
from coterie.tasks.read import read_sentences
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.readers.plain_text import split_words
from coterie.tasks.sources import find_split_file, has_split

CONLL_2003 = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
German JJ I-NP I-MISC
call NN I-NP O
. . O O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER
"""


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def pairs(source, **options):
    file = read_sentences(source, options=ReadOptions(**options))
    return [list(zip(sentence.words, sentence.tags, strict=True)) for sentence in file.sentences]


def test_the_original_four_column_conll_2003_file_is_read_and_turned_into_iob2(tmp_path):
    file = read_sentences(write(tmp_path, "eng.testa", CONLL_2003))
    assert file.scheme == "IOB1"
    assert file.repaired_tags == 0
    assert [sentence.words for sentence in file.sentences] == [
        ("EU", "rejects", "German", "call", "."),
        ("Peter", "Blackburn"),
    ]
    assert file.sentences[0].tags == ("B-ORG", "O", "B-MISC", "O", "O")
    assert file.sentences[1].tags == ("B-PER", "I-PER")
    assert [sentence.line for sentence in file.sentences] == [3, 9]


def test_windows_line_ends_a_bom_and_blank_lines_of_spaces_change_nothing(tmp_path):
    plain = pairs(write(tmp_path, "a.conll", CONLL_2003))
    dressed = b"\xef\xbb\xbf" + CONLL_2003.replace("\n\n", "\n \t\n\n").replace("\n", "\r\n").encode()
    assert pairs(write(tmp_path, "b.conll", dressed)) == plain


def test_the_label_column_is_the_users_choice(tmp_path):
    text = "Paris\tB-LOC\tx\nis\tO\ty\n"
    path = write(tmp_path, "a.conll", text)
    assert pairs(path, label_column=1) == [[("Paris", "B-LOC"), ("is", "O")]]
    with pytest.raises(DataError, match=r"a\.conll:1: 'x' is not an entity tag"):
        read_sentences(path)
    with pytest.raises(DataError, match=r"a\.conll:1: has 3 columns, so none with the index 7"):
        pairs(path, label_column=7)
    with pytest.raises(RecipeError, match="'ner' is given by a name"):
        pairs(path, label_column="ner")


def test_comments_between_sentences_are_skipped_but_the_word_hash_is_kept(tmp_path):
    text = "# id 17\tdomain=en\nParis _ _ B-LOC\n# _ _ O\n\n# id 18\n# _ _ O\nx _ _ O\n"
    expected = [[("Paris", "B-LOC"), ("#", "O")], [("#", "O"), ("x", "O")]]
    assert pairs(write(tmp_path, "a.conll", text)) == expected
    assert pairs(write(tmp_path, "b.conll", "#\tO\n")) == [[("#", "O")]]


def test_words_keep_spaces_that_do_not_separate_columns(tmp_path):
    text = "New York\tB-LOC\n\u00a0\tO\nb\u2028c\tO\n\u3000\tO\nx\u0085y\tO\n"
    assert [word for word, _ in pairs(write(tmp_path, "a.conll", text))[0]] == [
        "New York",
        "\u00a0",
        "b\u2028c",
        "\u3000",
        "x\u0085y",
    ]


def test_only_the_space_itself_separates_space_separated_columns(tmp_path):
    assert pairs(write(tmp_path, "a.conll", "x\u00a0y  O\n\u3000 O \n")) == [[("x\u00a0y", "O"), ("\u3000", "O")]]


def test_stray_inside_tags_are_repaired_and_counted(tmp_path):
    file = read_sentences(write(tmp_path, "a.conll", "a\tB-PER\nb\tO\nc\tI-LOC\nd\tI-LOC\ne\tI-PER\n"))
    assert file.scheme == "IOB2"
    assert file.repaired_tags == 2
    assert file.sentences[0].tags == ("B-PER", "O", "B-LOC", "I-LOC", "B-PER")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.conll", "x\tO\ny\tO\tO\n", r"a\.conll:2: 3 columns, but the file's first has 2"),
        ("a.conll", "x\tO\ny\n", r"a\.conll:2: 1 column, but the file's first has 2"),
        ("a.conll", "x\ny\n", r"a\.conll:1: 1 column, but a word and a tag are needed"),
        ("a.conll", "x\tO\n\tO\n", r"a\.conll:2: the column of the word is empty"),
        ("a.conll", "x\tO\ny\tQ-PER\n", r"a\.conll:2: 'Q-PER' is not an entity tag"),
        ("a.conll", "x\tO\ny\t0\n", r"a\.conll:2: '0' is not an entity tag"),
        ("a.conll", "x\tO\ny\0\tO\n", r"a\.conll:2: a NUL byte"),
        ("a.conll", b"x\tO\n\xe9\tO\n", r"a\.conll:2: byte 0xe9 is not valid utf-8"),
        ("a.conll", "x\tO\n".encode("utf-16"), "is UTF-16 text"),
        ("a.conll", "", "holds no sentence"),
        ("a.conll", "\n \n# only a comment\n-DOCSTART- O\n", "holds no sentence"),
        ("a.jsonl", '{"tokens": ["x"], "ner_tags": ["O"]}\n{"tokens": [', r"a\.jsonl:2: broken JSON"),
        ("a.jsonl", "\n[1]\n", r"a\.jsonl:2: is not a row of named fields"),
        ("a.jsonl", "[" * 5000, r"a\.jsonl:1: broken JSON"),
        ("a.jsonl", '{"tokens": ["\\ud83d"], "ner_tags": ["O"]}', r"a\.jsonl:1: "),
        ("a.jsonl", '{"text": ["x"]}', r"a\.jsonl:1: has no field tokens or words; its fields: text"),
        ("a.jsonl", '{"tokens": ["x"]}', r"a\.jsonl:1: has no field ner_tags"),
        ("a.jsonl", '{"tokens": "x", "tags": ["O"]}', r"a\.jsonl:1: the words are not a list of strings"),
        ("a.jsonl", '{"tokens": ["x", 3], "tags": ["O", "O"]}', r"a\.jsonl:1: the words are not a list of strings"),
        ("a.jsonl", '{"tokens": ["x"], "tags": "O"}', r"a\.jsonl:1: the tags are not a list"),
        ("a.jsonl", '{"tokens": ["x", "y"], "tags": ["O"]}', r"a\.jsonl:1: 2 words but 1 tags"),
        ("a.jsonl", '{"tokens": ["x"], "tags": [null]}', r"a\.jsonl:1: None is not a tag"),
        ("a.jsonl", '{"tokens": ["x"], "tags": [true]}', r"a\.jsonl:1: True is not a tag"),
        ("a.jsonl", '{"tokens": ["x"], "tags": [1]}', r"a\.jsonl:1: the tags are integers"),
        ("a.jsonl", "\n\n", "holds no sentence"),
        ("a.csv", "sentence_id,word,tag\n1,x\n", r"a\.csv:2: has 2 fields, the header 3"),
        ("a.csv", "sentence_id,word,tag\n1,,O\n", r"a\.csv:2: the word is empty"),
        ("a.csv", 'sentence_id,word,tag\n1,"x,O\n2,y,O\n', r"a\.csv:\d+: broken CSV"),
        (
            "a.csv",
            "id,word,tag\n1,x,O\n",
            r"a\.csv:1: the header has no column sentence_id or .*; its columns: id, word",
        ),
        ("a.csv", "sentence_id,word,tag\n1,x,NN\n", r"a\.csv:2: 'NN' is not an entity tag"),
        ("a.csv", "", r"a\.csv:1: the header has no column"),
        ("a.parquet", b"PAR1", "is not read directly"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read_sentences(write(tmp_path, name, content))
    assert caught.value.hint


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no\.conll: cannot be read: No such file"):
        read_sentences(tmp_path / "no.conll")


def test_another_encoding_can_be_stated(tmp_path):
    path = write(tmp_path, "a.conll", "Orléans\tB-LOC\n".encode("cp1252"))
    assert pairs(path, encoding="cp1252") == [[("Orléans", "B-LOC")]]
    assert pairs(write(tmp_path, "b.conll", "é\tO\n".encode("utf-16")), encoding="utf-16") == [[("é", "O")]]
    with pytest.raises(RecipeError, match="'nonsense' is not known"):
        pairs(path, encoding="nonsense")


def test_emoji_and_right_to_left_text_come_through_every_format(tmp_path):
    words, tags = ("الرياض", "🙂👩‍👩‍👧", "ירושלים", "中文"), ("B-LOC", "O", "B-LOC", "O")
    expected = [list(zip(words, tags, strict=True))]
    columns = "".join(f"{word}\t{tag}\n" for word, tag in expected[0])
    assert pairs(write(tmp_path, "a.conll", columns)) == expected
    for ascii_only in (True, False):
        record = json.dumps({"words": words, "tags": tags}, ensure_ascii=ascii_only)
        assert pairs(write(tmp_path, "a.jsonl", record)) == expected
    table = "sentence_id,word,tag\n" + "".join(f"1,{word},{tag}\n" for word, tag in expected[0])
    assert pairs(write(tmp_path, "a.csv", "\ufeff" + table)) == expected


def test_jsonl_is_split_at_line_feeds_only(tmp_path):
    line = '{"tokens": ["a\u2028b", "c\u0085d"], "ner_tags": ["O", "B-X"]}'
    assert pairs(write(tmp_path, "a.jsonl", f"\n{line}\r\n\n{line}")) == [
        [("a\u2028b", "O"), ("c\u0085d", "B-X")],
        [("a\u2028b", "O"), ("c\u0085d", "B-X")],
    ]


def test_integer_tags_are_named_by_the_user(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"tokens": ["x", "y"], "labels": [2, 0]}')
    assert pairs(path, label_names=("O", "B-X", "I-X")) == [[("x", "B-X"), ("y", "O")]]
    with pytest.raises(DataError, match="the tag 2 is outside the 2 label names"):
        pairs(path, label_names=("O", "B-X"))


def test_fields_may_have_any_name(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"Wörter": ["x"], "Marken": ["B-X"], "tokens": 1}')
    assert pairs(path, text_column="wörter", label_column="Marken") == [[("x", "B-X")]]
    with pytest.raises(DataError, match="has no field 'gone'"):
        pairs(path, text_column="gone")


def test_the_kaggle_layout_with_empty_sentence_fields_is_read(tmp_path):
    text = (
        "Sentence #,Word,POS,Tag\r\nSentence: 1,Thousands,NNS,O\r\n,of,IN,O\r\n,London,NNP,B-geo\r\n"
        'Sentence: 2,"""",``,O\r\n,"a, b",NN,O\r\n,NA,NN,O\r\n'
    )
    expected = [[("Thousands", "O"), ("of", "O"), ("London", "B-geo")], [('"', "O"), ("a, b", "O"), ("NA", "O")]]
    assert pairs(write(tmp_path, "ner.csv", text)) == expected
    assert pairs(write(tmp_path, "bom.csv", b"\xef\xbb\xbf" + text.encode())) == expected


def test_csv_may_use_semicolons_tabs_and_other_names(tmp_path):
    text = "satz;wort;marke\n1;x;B-X\n1;y;O\n2;z;O\n"
    options = {"sentence_column": "satz", "text_column": "wort", "label_column": "marke"}
    assert pairs(write(tmp_path, "a.csv", text), **options) == [[("x", "B-X"), ("y", "O")], [("z", "O")]]
    assert pairs(write(tmp_path, "a.tsv", "sentence_id\tword\ttag\n1\tx\tO\n")) == [[("x", "O")]]


def test_the_format_is_found_by_content_where_the_name_says_nothing(tmp_path):
    assert pairs(write(tmp_path, "one", '{"tokens": ["x"], "tags": ["O"]}\n')) == [[("x", "O")]]
    assert pairs(write(tmp_path, "two.txt", "sentence_id,word,tag\n1,x,O\n")) == [[("x", "O")]]
    assert pairs(write(tmp_path, "three.txt", "x O\n")) == [[("x", "O")]]
    assert pairs(write(tmp_path, "four.dat", '{"tokens": ["x"], "tags": ["O"]}\n'), format="jsonl") == [[("x", "O")]]


def test_untagged_data_need_no_tags(tmp_path):
    conll = write(tmp_path, "a.conll", "Paris\n#\n\nBerlin\n")
    file = read_sentences(conll, options=ReadOptions(tagged=False))
    assert [sentence.words for sentence in file.sentences] == [("Paris", "#"), ("Berlin",)]
    assert {sentence.tags for sentence in file.sentences} == {()}
    assert file.scheme == "none"
    text = write(tmp_path, "a.txt", "Mr. O'Neil lives in Paris.\n\nEnd\n")
    lines = read_sentences(text, options=ReadOptions(tagged=False)).sentences
    assert [(sentence.line, sentence.words[-1]) for sentence in lines] == [(1, "."), (3, "End")]
    jsonl = write(tmp_path, "a.jsonl", '{"tokens": ["x"]}')
    assert read_sentences(jsonl, options=ReadOptions(tagged=False)).sentences[0].words == ("x",)
    with pytest.raises(DataError, match="plain text holds no tags"):
        read_sentences(text, options=ReadOptions(format="text"))


def test_running_text_is_split_into_words_and_punctuation():
    assert split_words("Mr. O'Neil's co-op, in U.S. (2007)!") == (
        *("Mr", ".", "O'Neil's", "co-op", ",", "in", "U.S", ".", "(", "2007", ")", "!"),
    )


def test_a_folder_gives_the_file_of_each_split(tmp_path):
    write(tmp_path, "train.conll", "x\tO\n")
    write(tmp_path, "valid.conll", "y\tO\n")
    write(tmp_path, "README.md", "hello")
    assert read_sentences(tmp_path, split="train").sentences[0].words == ("x",)
    assert read_sentences(tmp_path, split="dev").sentences[0].words == ("y",)
    assert [has_split(tmp_path, split, ReadOptions()) for split in ("train", "dev", "test")] == [True, True, False]
    assert not has_split(tmp_path / "train.conll", "dev", ReadOptions())
    with pytest.raises(DataError, match="holds no test data"):
        read_sentences(tmp_path, split="test")
    write(tmp_path, "train.jsonl", "")
    with pytest.raises(DataError, match=r"train\.conll, train\.jsonl could all be the train data"):
        find_split_file(tmp_path, "train")


def test_rows_in_memory_are_data_too():
    rows = [{"tokens": ["x"], "ner_tags": ["B-X"]}, {"tokens": ["y"], "ner_tags": ["O"]}]
    assert pairs(rows) == [[("x", "B-X")], [("y", "O")]]
    assert pairs({"train": rows}) == pairs(rows)
    with pytest.raises(DataError, match="the train rows in memory, row 1: 1 words but 0 tags"):
        read_sentences([rows[0], {"tokens": ["y"], "ner_tags": []}])
    with pytest.raises(DataError, match="row 0: is not a row of named fields"):
        read_sentences([("x", "O")])
    with pytest.raises(DataError, match="has no dev split; its splits: train"):
        read_sentences({"train": rows}, split="dev")


def test_hugging_face_data_sets_are_read_from_disk_and_from_memory(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the optional package `datasets` is not installed")
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER", "I-PER"])),
        }
    )
    rows = {"id": ["0", "1"], "tokens": [["Albert", "Wren"], ["was"]], "ner_tags": [[1, 2], [0]]}
    data = datasets.Dataset.from_dict(rows, features=features)
    expected = [[("Albert", "B-PER"), ("Wren", "I-PER")], [("was", "O")]]
    assert pairs(data) == expected
    data.save_to_disk(str(tmp_path / "plain"))
    assert pairs(tmp_path / "plain") == expected
    splits = datasets.DatasetDict({"train": data, "validation": data.select([1])})
    splits.save_to_disk(str(tmp_path / "splits"))
    assert pairs(tmp_path / "splits") == expected
    assert read_sentences(tmp_path / "splits", split="dev").sentences[0].words == ("was",)
    assert [has_split(tmp_path / "splits", split, ReadOptions()) for split in ("train", "dev", "test")] == [
        True,
        True,
        False,
    ]
    (tmp_path / "plain" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="cannot load it"):
        read_sentences(tmp_path / "plain")


def test_other_names_are_left_to_the_datasets_library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the optional package `datasets` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, "train.jsonl", '{"tokens": ["x"], "tags": ["B-X"]}\n')
    assert pairs(folder, format="datasets") == [[("x", "B-X")]]
    with pytest.raises(DataError, match="`datasets` cannot load it"):
        pairs(tmp_path / "nothing", format="datasets")
    with pytest.raises(DataError, match="is a file, not a folder"):
        pairs(folder / "train.jsonl", format="datasets")


def test_without_the_package_a_saved_data_set_is_refused_with_what_to_install(tmp_path, monkeypatch):
    write(tmp_path, "state.json", "{}")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="needs the package `datasets`") as caught:
        read_sentences(tmp_path)
    assert "coterie[datasets]" in caught.value.hint
