import pytest

from coterie.errors import DataError
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.rows import read_rows
from coterie.tasks.text_columns import LABELS, SCORES, TextColumns, find_columns


def columns(*names, answers=LABELS, **options):
    return find_columns(read_rows([dict.fromkeys(names, "x")]), ReadOptions(**options), answers)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("source", "label", "star", "sentence"), ("sentence", None, "label")),  # CoLA
        (("sentence", "label"), ("sentence", None, "label")),  # SST-2
        (("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("#1 String", "#2 String", "Quality")),  # MRPC
        (("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), ("question1", "question2", "is_duplicate")),
        (("index", "sentence1", "sentence2", "label"), ("sentence1", "sentence2", "label")),  # RTE
        (("index", "question", "sentence", "label"), ("question", "sentence", "label")),  # QNLI
        (("index", "sentence1", "sentence2", "label1", "gold_label"), ("sentence1", "sentence2", "gold_label")),  # MNLI
        (("premise", "hypothesis", "label", "idx"), ("premise", "hypothesis", "label")),  # MNLI on the hub
        (("text", "text_pair", "label"), ("text", "text_pair", "label")),  # banking77_pairs
        (("Text", "Category"), ("Text", None, "Category")),
    ],
)
def test_the_columns_of_usual_data_sets_are_found(names, expected):
    assert columns(*names) == TextColumns(text=expected[0], pair=expected[1], answer=expected[2])


def test_the_columns_of_sts_b_are_found():
    names = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")
    assert columns(*names, answers=SCORES) == TextColumns(text="sentence1", pair="sentence2", answer="score")


def test_the_user_s_columns_win_and_a_text_alone_means_single_texts():
    names = ("sentence1", "sentence2", "label", "other")
    assert columns(*names, text_column="other") == TextColumns(text="other", answer="label")
    assert columns(*names, text_column=0, pair_column="OTHER", label_column=1) == TextColumns(
        text="sentence1", pair="other", answer="sentence2"
    )
    assert columns(*names, tagged=False) == TextColumns(text="sentence1", pair="sentence2")
    assert columns("text", "x") == TextColumns(text="text")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "gone"}, "no column 'gone'; the columns are text, label"),
        ({"pair_column": "gone"}, "no column 'gone'"),
        ({"label_column": 5}, "no column 5"),
        ({"label_column": "text"}, "no column 'text'"),
    ],
)
def test_columns_that_are_not_there_are_named_with_those_there_are(options, message):
    with pytest.raises(DataError, match=message) as caught:
        columns("text", "label", **options)
    assert "_column" in caught.value.hint
    with pytest.raises(DataError, match="no column text or sentence"):
        columns("a", "b")
