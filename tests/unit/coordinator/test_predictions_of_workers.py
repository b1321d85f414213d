"""What a worker says of rows is only believed if it can be said of these rows."""

import numpy as np
import pytest

from coterie.coordinator.evaluation import check_predictions
from coterie.errors import ProtocolError
from coterie.tasks.catalog import get_task
from coterie.tasks.examples import EncodedExample

TAGS = get_task("token-classification", labels=("O", "B-X"))
LABELS = get_task("sequence-classification", labels=("no", "yes"))
SCORES = get_task("regression")
TEXT = get_task("causal-lm")


def rows(labels: np.ndarray) -> list[EncodedExample]:
    """Two rows of three tokens."""
    return [EncodedExample(input_ids=np.arange(3), labels=labels)] * 2


BY_TOKEN, BY_ROW, SCORED = rows(np.zeros(3, np.int64)), rows(np.array(1)), rows(np.array(0.5, np.float32))


@pytest.mark.parametrize(
    ("array", "of", "task"),
    [
        (np.ones((2, 4), np.int64), BY_TOKEN, TAGS),
        (np.full((2, 3), 40_000), BY_TOKEN, TEXT),
        (np.array([0, 1]), BY_ROW, LABELS),
        (np.array([-3.5, 9e9], np.float32), SCORED, SCORES),
    ],
)
def test_predictions_of_every_task_are_taken(array, of, task):
    check_predictions(array, of, task)


@pytest.mark.parametrize(
    ("array", "of", "task"),
    [
        (np.ones((2, 2), np.int64), BY_TOKEN, TAGS),
        (np.ones((2, 3, 1), np.int64), BY_TOKEN, TAGS),
        (np.ones(2, np.int64), BY_TOKEN, TEXT),
        (np.ones((3, 3), np.int64), BY_TOKEN, TEXT),
        (np.ones((2, 3), np.float32), BY_TOKEN, TEXT),
        (np.array(1), BY_ROW, LABELS),
        (np.array([[0], [1]]), BY_ROW, LABELS),
        (np.array([0.0, 1.0], np.float32), BY_ROW, LABELS),
        (np.array([0, 2]), BY_ROW, LABELS),
        (np.array([-1, 1]), BY_ROW, LABELS),
        (np.array([0, 1]), SCORED, SCORES),
    ],
)
def test_what_cannot_be_said_of_these_rows_is_refused(array, of, task):
    with pytest.raises(ProtocolError):
        check_predictions(array, of, task)
