import json
from pathlib import Path

import pytest

from coterie.errors import DataError, MissingPackageError, RecipeError
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.rows import read_rows, text_of


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def fields(source, **options):
    return [dict(row.fields) for row in read_rows(source, options=ReadOptions(**options)).rows]


def lines(source):
    return [row.line for row in read_rows(source).rows]


def test_json_lines_a_list_in_json_and_rows_in_memory_give_the_same_rows(tmp_path):
    rows = [{"text": "a\u2028b", "label": 1}, {"text": "c", "label": None}]
    as_lines = write(tmp_path, "a.jsonl", "\n" + "\r\n\n".join(map(json.dumps, rows)))
    assert fields(as_lines) == fields(write(tmp_path, "a.json", json.dumps(rows))) == fields(rows) == rows
    assert lines(as_lines) == [2, 4]
    assert lines(rows) == [0, 0]
    file = read_rows(as_lines)
    assert file.where(1) == f"{as_lines}:4"
    assert read_rows(rows).where(1) == "the train rows in memory, row 1"


def test_a_table_with_quotes_line_ends_in_fields_and_a_byte_order_mark_is_read_with_the_lines_of_its_rows(tmp_path):
    text = '\ufefftext,label\r\n"a, ""b""\r\nc",x\r\n\r\n , \r\nd,y\r\n'
    path = write(tmp_path, "a.csv", text)
    assert fields(path) == [{"text": 'a, "b"\r\nc', "label": "x"}, {"text": "d", "label": "y"}]
    assert lines(path) == [2, 6]
    assert fields(write(tmp_path, "b.csv", "text;label\na, b;x\n")) == [{"text": "a, b", "label": "x"}]


def test_tab_separated_files_of_glue_keep_their_quotes_as_they_are(tmp_path):
    text = '\ufeffQuality\t#1 ID\t#1 String\n1\t7\t"Hello," he said.\n0\t8\t"All of it."\n1\t9\tno " end\n'
    found = fields(write(tmp_path, "train.tsv", text))
    assert [row["#1 String"] for row in found] == ['"Hello," he said.', '"All of it."', 'no " end']
    assert found[0]["Quality"] == "1"


def test_tab_separated_files_in_which_a_program_quoted_fields_lose_the_quotes(tmp_path):
    text = 'text\tlabel\n"a ""b""\tc\nd"\t1\nx\t2\n'
    path = write(tmp_path, "a.tsv", text)
    assert [row["text"] for row in fields(path)] == ['a "b"\tc\nd', "x"]
    assert lines(path) == [2, 4]
    every = write(tmp_path, "b.tsv", '"text"\t"label"\r\n"a"\t"1"\r\n')
    assert fields(every) == [{"text": "a", "label": "1"}]


def test_colas_files_without_a_header_are_known_by_their_four_columns(tmp_path):
    text = "gj04\t1\t\tOur friends, won, by, far, and, wide.\nc_13\t0\t*\tThe ball rolled Bill.\n"
    assert fields(write(tmp_path, "train.tsv", text)) == [
        {"source": "gj04", "label": "1", "star": "", "sentence": "Our friends, won, by, far, and, wide."},
        {"source": "c_13", "label": "0", "star": "*", "sentence": "The ball rolled Bill."},
    ]
    assert fields(write(tmp_path, "test.tsv", "index\tsentence\n0\tBill\n")) == [{"index": "0", "sentence": "Bill"}]


def test_a_first_row_whose_label_comes_again_is_no_header(tmp_path):
    path = write(tmp_path, "a.csv", "3,good\n1,bad\n3,fine\n")
    assert fields(path, label_column=0) == [
        {"column 0": "3", "column 1": "good"},
        {"column 0": "1", "column 1": "bad"},
        {"column 0": "3", "column 1": "fine"},
    ]
    named = write(tmp_path, "b.csv", "stars,review\n3,good\n1,bad\n")
    assert fields(named, label_column=0)[0] == {"stars": "3", "review": "good"}


def test_plain_text_has_a_row_a_line_and_the_format_is_found_by_content(tmp_path):
    path = write(tmp_path, "a.txt", "one, two\ttabs\n \n\n🙂 שלום\n")
    assert fields(path) == [{"text": "one, two\ttabs"}, {"text": "🙂 שלום"}]
    assert lines(path) == [1, 4]
    assert fields(write(tmp_path, "b.txt", '{"text": "x"}\n')) == [{"text": "x"}]
    assert fields(write(tmp_path, "c.txt", "sentence\tlabel\nx\t1\n")) == [{"sentence": "x", "label": "1"}]
    assert fields(write(tmp_path, "d", "text,label\nx,1\n")) == [{"text": "x", "label": "1"}]
    assert fields(write(tmp_path, "e.dat", '{"text": "x"}'), format="jsonl") == [{"text": "x"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": ', r"a\.jsonl:3: broken JSON"),
        ("a.jsonl", '"x"\n', r"a\.jsonl:1: is not a row of named fields"),
        ("a.jsonl", "{" * 3000, r"a\.jsonl:1: broken JSON"),
        ("a.jsonl", "\n \n", "holds no row"),
        ("a.json", '[{"text": "x"}, 3]', r"a\.json, row 1: is not a row of named fields"),
        ("a.json", '[{"text": "x"},', r"a\.json: broken JSON"),
        ("a.csv", "text,label\nx,1\ny\n", r"a\.csv:3: has 1 fields, the header 2"),
        ("a.csv", 'text,label\nx,1\n"y,2\nz,3\n', r"a\.csv:\d: broken CSV"),
        ("a.csv", "text,text\nx,1\n", r"a\.csv:1: two columns are called 'text'"),
        ("a.csv", "text,label\n", "holds no row"),
        ("a.csv", "", "holds no row"),
        ("a.csv", b"text,label\nx\0,1\n", r"a\.csv:2: a NUL byte"),
        ("a.csv", b"text,label\n\n\xe9,1\n", r"a\.csv:3: byte 0xe9 is not valid utf-8"),
        ("a.tsv", "text\tlabel\nx\t1\ty\n", r"a\.tsv:2: has 3 fields, the header 2"),
        ("a.parquet", b"PAR1", "is not read directly"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read_rows(write(tmp_path, name, content))
    assert caught.value.hint


def test_wrong_formats_and_encodings_are_told(tmp_path):
    path = write(tmp_path, "a.csv", "text,label\né,1\n".encode("cp1252"))
    assert fields(path, encoding="cp1252") == [{"text": "é", "label": "1"}]
    with pytest.raises(RecipeError, match="'nonsense' is not known"):
        fields(path, encoding="nonsense")
    with pytest.raises(DataError, match="CoNLL columns hold words"):
        fields(path, format="conll", encoding="cp1252")
    with pytest.raises(DataError, match="is a file, not a folder"):
        fields(path, format="datasets", encoding="cp1252")


def test_a_folder_gives_the_file_of_each_split_and_of_mnli_the_matched_one(tmp_path):
    for name in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path, f"{name}.tsv", f"sentence1\tgold_label\n{name}\tneutral\n")
    assert read_rows(tmp_path, split="train").rows[0].fields["sentence1"] == "train"
    assert read_rows(tmp_path, split="dev").rows[0].fields["sentence1"] == "dev_matched"
    with pytest.raises(DataError, match="holds no test data"):
        read_rows(tmp_path, split="test")


def test_hugging_face_data_sets_come_with_the_names_of_their_classes(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the optional package `datasets` is not installed")
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    data = datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": data, "validation_matched": data.select([1])}).save_to_disk(str(tmp_path / "d"))
    for source, split in ((data, "train"), (tmp_path / "d", "train"), (tmp_path / "d", "dev")):
        file = read_rows(source, split=split)
        assert file.class_names == {"label": ("bad", "good")}
        assert file.rows[-1].fields == {"sentence": "y", "label": 0}
    with pytest.raises(DataError, match="has no test split; its splits: train, validation_matched"):
        read_rows(tmp_path / "d", split="test")


def test_without_the_package_a_saved_data_set_is_refused_with_what_to_install(tmp_path, monkeypatch):
    write(tmp_path, "state.json", "{}")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="needs the package `datasets`"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the text is absent"),
        (3, "the text is int '3', not a string"),
        (["x"], "is list"),
        ("a\ud83d", "half a surrogate pair"),
    ],
)
def test_only_strings_are_texts(value, message):
    with pytest.raises(DataError, match=rf"file:7: {message}|file:7: .*{message}"):
        text_of(value, "file:7", "the text")
    assert text_of("🙂", "file:7", "the text") == "🙂"
