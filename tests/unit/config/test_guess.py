"""Which task and which columns: what the usual data sets' columns are taken for."""

import pytest

from coterie.config.data_look import DataLook
from coterie.config.guess import columns_for, guess_task, no_guess, with_columns
from coterie.errors import DataError, RecipeError, UsageError


def rows(*first, **columns):
    return DataLook(source="d", layout="rows", rows=first or (columns, columns))


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
LONG = "a summary of more than three words"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"tokens": ["a"], "ner_tags": [0]}, ("token-classification", "tokens", None, "ner_tags")),
        ({"sentence1": "a", "sentence2": "b", "score": 2.5}, ("regression", "sentence1", "sentence2", "score")),
        ({"text": "a", "text_pair": "b", "label": "0.25"}, ("regression", "text", "text_pair", "label")),
        ({"sentence": "a", "score": 3}, ("regression", "sentence", None, "score")),
        ({"text": "a", "label": "x"}, ("sequence-classification", "text", None, "label")),
        ({"Text": "a", "Label": 1}, ("sequence-classification", "Text", None, "Label")),
        (
            {"premise": "a", "hypothesis": "b", "label": 1},
            ("sequence-classification", "premise", "hypothesis", "label"),
        ),
        ({"question": "a", "sentence": "b", "label": 1}, ("sequence-classification", "question", "sentence", "label")),
        ({"text": "a", "target": "good"}, ("sequence-classification", "text", None, "target")),
        ({"messages": CHAT}, ("causal-lm", "messages", None, None)),
        ({"instruction": "a", "input": "", "output": "b"}, ("causal-lm", "instruction", "input", "output")),
        ({"question": "a", "answer": "b"}, ("causal-lm", "question", None, "answer")),
        ({"id": "1", "dialogue": "a", "summary": LONG}, ("summarization", "dialogue", None, "summary")),
        ({"section": "X", "dialogue": "a", "summary": LONG}, ("summarization", "dialogue", None, "summary")),
        ({"source": "a", "summaries": [LONG, LONG]}, ("summarization", "source", None, "summaries")),
        ({"text": "a"}, ("causal-lm", "text", None, None)),
    ],
)
def test_usual_columns_say_what_is_to_be_learnt(columns, expected):
    guess = guess_task(rows(**columns))
    assert (guess.task, guess.text_column, guess.pair_column, guess.label_column) == expected
    assert guess.reason


def test_tagged_words_and_plain_text_need_no_columns():
    assert guess_task(DataLook(source="d", layout="tagged words")).task == "token-classification"
    assert guess_task(DataLook(source="d", layout="plain text", rows=({"text": "a"},))).task == "causal-lm"


def test_integer_tags_need_names_unless_the_data_set_knows_them():
    look = rows(tokens=["a"], ner_tags=[0])
    assert guess_task(look).needs_label_names
    known = DataLook(source="d", layout="rows", rows=look.rows, named_columns=("ner_tags",))
    assert not guess_task(known).needs_label_names
    assert not guess_task(rows(tokens=["a"], ner_tags=["O"])).needs_label_names


def test_labels_are_sorted_as_numbers_where_they_are_numbers():
    look = rows(*({"text": "t", "label": value} for value in (10, 2, 0, 2)))
    assert guess_task(look).labels == ("0", "2", "10")


def test_a_column_with_a_different_text_in_every_row_holds_no_labels():
    look = rows(*({"text": "t", "label": f"answer {index}"} for index in range(300)))
    assert columns_for("sequence-classification", look) is None


def test_nothing_is_guessed_from_unknown_columns():
    look = rows(a="x", b="y")
    assert guess_task(look) is None
    assert isinstance(no_guess(look, None), UsageError)
    assert "a, b" in no_guess(look, None).message


@pytest.mark.parametrize(
    ("task", "column"), [("sequence-classification", "section"), ("summarization", "summary"), ("causal-lm", None)]
)
def test_a_task_that_is_asked_for_finds_its_own_columns(task, column):
    look = rows(section="X", dialogue="a", summary=LONG)
    guess = columns_for(task, look)
    assert (guess.task, guess.text_column, guess.label_column) == (task, "dialogue", column)


def test_a_task_that_the_data_are_not_for_is_refused():
    look = DataLook(source="d", layout="tagged words")
    assert columns_for("regression", look) is None
    assert isinstance(no_guess(look, "regression"), DataError)


def test_named_columns_win_and_bring_their_labels():
    look = rows({"text": "t", "label": "x", "other": "p"}, {"text": "t", "label": "y", "other": "q"})
    guess = with_columns(guess_task(look), look, {"label_column": "other", "text_column": None})
    assert (guess.label_column, guess.labels) == ("other", ("p", "q"))


def test_a_named_column_must_exist():
    look = rows(text="t", label="x")
    with pytest.raises(RecipeError, match="no column 'labell'"):
        with_columns(guess_task(look), look, {"label_column": "labell"})
