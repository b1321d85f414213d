import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.sidetuning.selection import is_labelled, select_tokens

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
CLASSES = torch.tensor([2, 0, -100])
TAGS = torch.tensor([[-100, 1, -100, 0], [-100, -100, -100, -100], [2, -100, 1, -100]])


def pairs(selection):
    return list(zip(selection.rows.tolist(), selection.positions.tolist(), strict=True))


def test_an_encoders_first_token_is_sent_of_rows_with_a_label():
    selection = select_tokens(CLASSES, MASK, "first")
    assert pairs(selection) == [(0, 0), (1, 0)]
    assert selection.counts.tolist() == [1, 1, 0]
    assert selection.loss_index is None
    assert selection.loss_labels(CLASSES).tolist() == [2, 0]


def test_a_decoders_last_token_before_the_padding_is_sent():
    assert pairs(select_tokens(CLASSES, MASK, "last")) == [(0, 3), (1, 1)]


def test_a_score_that_is_nan_is_none():
    scores = torch.tensor([0.5, torch.nan, 0.0])
    selection = select_tokens(scores, MASK, "last")
    assert pairs(selection) == [(0, 3), (2, 2)]
    assert selection.loss_labels(scores).tolist() == [0.5, 0.0]
    assert is_labelled(scores).tolist() == [True, False, True]


def test_of_tags_and_text_every_token_with_a_label_is_sent_by_row_then_position():
    selection = select_tokens(TAGS, MASK, "labelled")
    assert pairs(selection) == [(0, 1), (0, 3), (2, 0), (2, 2)]
    assert selection.counts.tolist() == [2, 0, 2]
    assert selection.loss_labels(TAGS).tolist() == [1, 0, 2, 1]


def test_without_the_selector_all_tokens_but_padding_are_sent_and_those_of_the_loss_are_known_among_them():
    for labels, reads, index, learnt in (
        (CLASSES, "first", [0, 4], [2, 0]),
        (CLASSES, "last", [3, 5], [2, 0]),
        (TAGS, "labelled", [1, 3, 6, 8], [1, 0, 2, 1]),
    ):
        selection = select_tokens(labels, MASK, reads, selects_tokens=False)
        assert selection.counts.tolist() == [4, 2, 3]
        assert selection.loss_index.tolist() == index
        assert selection.loss_labels(labels).tolist() == learnt


def test_in_prediction_every_row_or_every_token_is_read():
    assert pairs(select_tokens(None, MASK, "first")) == [(0, 0), (1, 0), (2, 0)]
    assert pairs(select_tokens(None, MASK, "last")) == [(0, 3), (1, 1), (2, 2)]
    assert select_tokens(None, MASK, "labelled").counts.tolist() == [4, 2, 3]


def test_what_equals_the_pad_token_is_passed_over_although_it_is_present():
    readable = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    selection = select_tokens(CLASSES, readable, "last", present=MASK)
    assert pairs(selection) == [(0, 2), (1, 1)]
    everything = select_tokens(CLASSES, readable, "last", selects_tokens=False, present=MASK)
    assert everything.counts.tolist() == [4, 2, 3]
    assert everything.loss_index.tolist() == [2, 5]


@pytest.mark.parametrize("reads", ["first", "last", "labelled"])
def test_rows_without_tokens_and_batches_without_rows_are_empty(reads):
    empty = torch.zeros(0, 0, dtype=torch.long)
    labels = empty if reads == "labelled" else torch.zeros(0, dtype=torch.long)
    selection = select_tokens(labels, empty, reads)
    assert (pairs(selection), selection.counts.tolist()) == ([], [])
    narrow = torch.zeros(2, 0, dtype=torch.long)
    labels = narrow if reads == "labelled" else torch.ones(2, dtype=torch.long)
    assert select_tokens(labels, narrow, reads).counts.tolist() == [0, 0]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.booleans())
def test_gathering_labels_by_a_selection_is_reading_them_one_by_one(lengths, seed, selects_tokens):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[int(token < length) for token in range(max(lengths))] for length in lengths])
    labels = torch.randint(0, 9, mask.shape, generator=draw)
    labels = labels.masked_fill((torch.rand(mask.shape, generator=draw) < 0.5) | (mask == 0), -100)
    selection = select_tokens(labels, mask, "labelled", selects_tokens=selects_tokens)
    assert selection.loss_labels(labels).tolist() == [label for label in labels.flatten().tolist() if label != -100]
    assert selection.gather(labels.unsqueeze(-1)).shape == (int(selection.counts.sum()), 1)
    assert pairs(selection) == sorted(pairs(selection))
