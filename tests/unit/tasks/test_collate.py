import numpy as np

from coterie.tasks.collate import collate
from coterie.tasks.examples import EncodedExample


def row(*ids: int, label: int = 1, types: bool = False) -> EncodedExample:
    return EncodedExample(
        input_ids=np.array(ids, dtype=np.int64),
        labels=np.full(len(ids), label),
        token_type_ids=np.ones(len(ids), dtype=np.int64) if types else None,
    )


def test_rows_are_padded_to_the_longest_of_their_own_micro_batch():
    for length in (128, 129, 40):
        arrays = collate([row(*range(1, length + 1)), row(7, 8)], pad_token_id=0)
        assert {array.shape for array in arrays.values()} == {(2, length)}
        assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}


def test_padding_is_masked_and_carries_no_label():
    arrays = collate([row(5, 6, 7, types=True), row(8, types=True)], pad_token_id=9)
    assert arrays["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert arrays["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert arrays["labels"].tolist() == [[1, 1, 1], [1, -100, -100]]
    assert arrays["token_type_ids"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_real_token_equal_to_the_pad_token_stays_visible_and_labelled():
    arrays = collate([row(5, 2), row(6, 7, 2)], pad_token_id=2)
    assert arrays["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert arrays["labels"].tolist() == [[1, 1, -100], [1, 1, 1]]


def test_lengths_round_up_to_a_multiple():
    assert collate([row(1, 2, 3)], pad_token_id=0, pad_to_multiple=8)["input_ids"].shape == (1, 8)


def test_no_rows_give_empty_arrays_and_a_row_without_tokens_one_masked_column():
    assert collate([], pad_token_id=0)["input_ids"].shape == (0, 0)
    arrays = collate([row()], pad_token_id=3)
    assert arrays["input_ids"].tolist() == [[3]]
    assert arrays["attention_mask"].tolist() == [[0]]
    assert arrays["labels"].tolist() == [[-100]]


def test_one_real_score_for_a_row_stays_real():
    rows = [
        EncodedExample(input_ids=np.array([1]), labels=np.array(score, dtype=np.float32)) for score in (0.5, np.nan)
    ]
    labels = collate(rows, pad_token_id=0)["labels"]
    assert labels.dtype == np.float32
    np.testing.assert_array_equal(labels, np.array([0.5, np.nan], dtype=np.float32))


def test_one_label_for_a_row_makes_one_column():
    rows = [EncodedExample(input_ids=np.array([1, 2]), labels=np.array(label)) for label in (3, 0)]
    assert collate(rows, pad_token_id=0)["labels"].tolist() == [3, 0]
