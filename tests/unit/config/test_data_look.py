"""A first look at training data: layout, columns, neighbors, and what is refused."""

import json

import pytest

from coterie.config.data_look import ROWS_LOOKED_AT, look_at_data
from coterie.errors import DataError

CONLL = "EU\tB-ORG\nrejects\tO\n\nPeter\tB-PER\nmet\tO\nMary\tB-PER\n"


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ["train.conll", "train.txt", "train"])
def test_tagged_words_are_known_by_their_tags_whatever_the_file_is_called(tmp_path, name):
    (tmp_path / name).write_text(CONLL)
    look = look_at_data(str(tmp_path / name))
    assert (look.layout, look.longest_words, look.columns) == ("tagged words", 3, ())


def test_csv_with_a_word_a_row_is_tagged_words(tmp_path):
    (tmp_path / "a.csv").write_text("Sentence #,Word,Tag\n1,EU,B-ORG\n")
    assert look_at_data(str(tmp_path / "a.csv")).layout == "tagged words"


@pytest.mark.parametrize(
    ("content", "documents"),
    [("A time.\nOnce.\n\nThere was O.\n", ["A time.\nOnce.", "There was O."]), ("One.\nTwo.\n", ["One.", "Two."])],
)
def test_prose_is_plain_text_in_documents(tmp_path, content, documents):
    (tmp_path / "a.txt").write_text(content)
    look = look_at_data(str(tmp_path / "a.txt"))
    assert (look.layout, [row["text"] for row in look.rows]) == ("plain text", documents)


def test_a_list_in_json_holds_rows_too(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "b"}]')
    assert look_at_data(str(tmp_path / "a.json")).values("text") == ("a", "b")


def test_rows_have_the_columns_of_all_rows_in_order(tmp_path):
    look = look_at_data(jsonl(tmp_path / "a.jsonl", [{"text": "a\u2028b", "label": 1}, {"text": "c", "more": None}]))
    assert look.layout == "rows"
    assert look.columns == ("text", "label", "more")
    assert look.values("text") == ("a\u2028b", "c")
    assert look.values("more") == ()


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t")])
def test_csv_rows_with_a_byte_order_mark_and_any_delimiter(tmp_path, name, mark):
    (tmp_path / name).write_text(f'\ufefftext{mark}label\n"a{mark}b"{mark}yes\n', encoding="utf-8")
    assert look_at_data(str(tmp_path / name)).rows == ({"text": f"a{mark}b", "label": "yes"},)


def test_a_training_file_finds_its_neighbors_of_the_same_kind(tmp_path):
    for name in ("train.jsonl", "validation.jsonl", "test.csv"):
        jsonl(tmp_path / name, [{"text": "a"}])
    look = look_at_data(str(tmp_path / "train.jsonl"))
    assert look.others == {"dev": str(tmp_path / "validation.jsonl")}
    assert look_at_data(str(tmp_path)).others == {}  # a folder holds its splits itself
    assert look_at_data(str(tmp_path / "validation.jsonl")).others == {}


def test_a_large_file_is_looked_at_from_its_beginning_only(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": str(index)} for index in range(ROWS_LOOKED_AT + 5)])
    assert len(look_at_data(path).rows) == ROWS_LOOKED_AT


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "\n \n", "is empty"),
        ("a.csv", "text,label\n", "holds no row"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "a.jsonl:2"),
        ("a.json", '[{"text": "a"}\n', "a.json"),
        ("a.csv", 'text,label\n"a,b\n', "broken CSV"),
        ("a.xlsx", "PK", "the format .xlsx is not known"),
        ("a.parquet", "PAR1", "not read directly"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        look_at_data(str(tmp_path / name))
    assert message in caught.value.message
    assert caught.value.hint


def test_a_file_or_split_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        look_at_data(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="holds no train data"):
        look_at_data(str(tmp_path))
