import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.pipeline.micro_batch import row_ranges, split_batch


@given(rows=st.integers(0, 50), micro_batches=st.integers(1, 12))
def test_row_ranges_cover_all_rows_once_in_order_and_differ_by_at_most_one(rows: int, micro_batches: int) -> None:
    ranges = row_ranges(rows, micro_batches)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in ranges]
    assert len(sizes) == micro_batches
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_three_rows_make_three_micro_batches_and_an_empty_one() -> None:
    labels = torch.tensor([[1, -100], [-100, -100], [2, 3]])
    parts = split_batch({"input_ids": torch.arange(6).view(3, 2)}, labels, micro_batches=4, step=7, samples_seen=20)
    assert [part.rows for part in parts] == [1, 1, 1, 0]
    assert [part.micro_batch_loss_tokens for part in parts] == [1, 0, 2, 0]
    assert {part.step_loss_tokens for part in parts} == {3}
    assert [part.samples_seen for part in parts] == [20, 21, 22, 23]
    assert [part.step for part in parts] == [7] * 4
    assert parts[2].inputs["input_ids"].tolist() == [[4, 5]]


def test_of_real_labels_those_that_are_no_number_carry_no_loss() -> None:
    labels = torch.tensor([0.5, float("nan"), -100.0, 2.0])
    parts = split_batch({"input_ids": torch.zeros(4, 2)}, labels, micro_batches=2, step=0, samples_seen=0)
    assert [part.micro_batch_loss_tokens for part in parts] == [1, 2]
    assert {part.step_loss_tokens for part in parts} == {3}
