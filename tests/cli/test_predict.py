"""`coterie predict` and `coterie.predict`: a tag for every word, in any format."""

import io
import json

import pytest

import coterie
from coterie.cli.main import main


def test_a_sentence_on_the_command_line_gets_a_tag_for_every_word(told, tagger):
    code, out, err = told("predict", tagger, "--text", "Anna lives in Paris.", "--text", "Rome is old")
    assert code == 0
    blocks = [[line.split("\t") for line in block.splitlines()] for block in out.strip().split("\n\n")]
    assert [[word for word, _ in block] for block in blocks] == [
        ["Anna", "lives", "in", "Paris", "."],
        ["Rome", "is", "old"],
    ]
    assert all(tag == "O" or tag[:2] in {"B-", "I-"} for block in blocks for _, tag in block)
    assert "model" in err  # what is said meanwhile is not among the answers


def test_python_gives_what_the_command_gives(answer, tagger):
    _, found = answer("predict", tagger, "--text", "Anna lives in Paris.")
    (row,) = coterie.predict(tagger, ["Anna lives in Paris."])
    assert list(row.words) == found["predictions"][0]["words"]
    assert list(row.tags) == found["predictions"][0]["tags"]


def test_lines_of_the_standard_input_are_sentences(tagger, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Anna lives in Paris.\n\nRome is old\n"))
    assert main(["predict", str(tagger)]) == 0
    assert capsys.readouterr().out.count("\n\n") == 1


def test_an_empty_standard_input_is_an_error(answer, tagger, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n \n"))
    code, found = answer("predict", tagger)
    assert code == 4
    assert "no sentence" in found["error"]["message"]


@pytest.mark.parametrize("suffix", ["conll", "jsonl", "csv"])
def test_answers_are_written_and_can_be_evaluated_as_perfect(answer, tagger, data, tmp_path, suffix):
    output = tmp_path / f"answers.{suffix}"
    code, found = answer("predict", tagger, "--data", data, "--output", output)
    assert (code, found["rows"], found["output"], found["predictions"]) == (0, 4, str(output), None)
    _, figures = answer("evaluate", tagger, "--data", output)
    assert figures["metrics"]["entity_f1"] == 1.0


def test_answers_in_the_data_are_ignored(answer, tagger, data, tmp_path):
    plain = tmp_path / "plain.jsonl"
    rows = [block.splitlines() for block in data.read_text().strip().split("\n\n")]
    plain.write_text("".join(json.dumps({"tokens": [line.split("\t")[0] for line in row]}) + "\n" for row in rows))
    _, with_tags = answer("predict", tagger, "--data", data)
    _, without = answer("predict", tagger, "--data", plain)
    assert [row["tags"] for row in with_tags["predictions"]] == [row["tags"] for row in without["predictions"]]


def test_a_text_file_has_a_sentence_a_line(answer, tagger, tmp_path):
    (tmp_path / "text.txt").write_text("Anna lives in Paris.\nRome is old\n")
    _, found = answer("predict", tagger, "--data", tmp_path / "text.txt")
    assert [row["words"] for row in found["predictions"]] == [
        ["Anna", "lives", "in", "Paris", "."],
        ["Rome", "is", "old"],
    ]


def test_words_beyond_the_context_are_outside(answer, tagger):
    _, found = answer("predict", tagger, "--text", "rome " * 50)
    assert found["predictions"][0]["tags"][31:] == ["O"] * 19


def test_an_unknown_suffix_is_refused_before_the_model_is_read(answer, tmp_path):
    code, found = answer("predict", tmp_path / "nowhere", "--text", "a", "--output", "answers.xml")
    assert code == 2
    assert "answers.xml" in found["error"]["message"]
    assert found["error"]["hint"] == "end it in .conll or .jsonl or .csv"


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        ("sequence-classification", "end it in .txt or .jsonl or .csv"),
        ("regression", "end it in .txt or .jsonl or .csv"),
        ("causal-lm", "end it in .jsonl"),
        ("summarization", "end it in .jsonl"),
    ],
)
def test_each_task_says_which_suffixes_it_writes(answer, tmp_path, task, hint):
    words = ("--task", task, "--text", "a", "--output", "answers.conll")
    code, found = answer("predict", tmp_path / "nowhere", *words)
    assert (code, found["error"]["hint"]) == (2, hint)


def test_data_and_text_exclude_each_other(answer, tagger):
    code, found = answer("predict", tagger, "--data", "x", "--text", "y")
    assert code == 2
    assert "not allowed with" in found["error"]["message"]
