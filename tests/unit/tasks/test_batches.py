from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import DataError, RecipeError
from coterie.tasks.batches import BatchSettings, batch_shapes, epoch_steps, evaluation_batches, plan_steps

RELAXED = settings(deadline=None, max_examples=60)  # a busy machine is no failure

SETTINGS = st.builds(
    BatchSettings,
    batch_rows=st.integers(1, 12),
    micro_batches=st.integers(1, 6),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    group_by_length=st.booleans(),
)
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=120).map(np.array)


@RELAXED
@given(LENGTHS, SETTINGS)
def test_every_row_comes_exactly_once_in_every_epoch(lengths, order):
    for epoch in range(order.epochs):
        rows = [row for step in epoch_steps(lengths, order, epoch) for row in step.rows]
        assert sorted(rows) == list(range(len(lengths)))


@RELAXED
@given(LENGTHS, SETTINGS)
def test_micro_batches_divide_each_step_evenly_with_empty_ones_last(lengths, order):
    steps = list(plan_steps(lengths, order))
    assert all(len(step.rows) == order.batch_rows for step in epoch_steps(lengths, order, 0)[:-1])
    for step in steps:
        sizes = [len(part) for part in step.micro_batches]
        assert len(sizes) == order.micro_batches
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@RELAXED
@given(LENGTHS, SETTINGS)
def test_the_order_depends_on_seed_and_epoch_alone(lengths, order):
    assert list(plan_steps(lengths, order)) == list(plan_steps(lengths.copy(), order))


@RELAXED
@given(LENGTHS, SETTINGS, st.data())
def test_a_run_resumed_at_any_step_takes_the_rows_that_were_left(lengths, order, data):
    steps = list(plan_steps(lengths, order))
    first = data.draw(st.integers(0, len(steps)))
    assert list(plan_steps(lengths, order, first_step=first)) == steps[first:]
    assert [step.step for step in steps] == list(range(len(steps)))


@RELAXED
@given(LENGTHS, SETTINGS)
def test_samples_seen_counts_the_rows_before_each_step(lengths, order):
    seen = 0
    for step in plan_steps(lengths, order):
        assert step.samples_seen == seen
        seen += len(step.rows)
    assert seen == len(lengths) * order.epochs


@RELAXED
@given(st.integers(0, 2**63 - 1))
def test_seeds_and_epochs_give_different_orders(seed):
    lengths = np.full(200, 7)
    plain = BatchSettings(seed=seed, group_by_length=False)
    first = epoch_steps(lengths, plain, 0)
    assert [step.rows for step in first] != [step.rows for step in epoch_steps(lengths, plain, 1)]
    other = BatchSettings(seed=seed + 1, group_by_length=False)
    assert [step.rows for step in first] != [step.rows for step in epoch_steps(lengths, other, 0)]


def test_the_order_of_a_seed_is_fixed_for_all_versions():
    lengths = np.arange(1, 11)
    steps = epoch_steps(lengths, BatchSettings(batch_rows=3, micro_batches=2, seed=42, group_by_length=False), 1)
    assert [step.micro_batches for step in steps] == [((4, 9), (5,)), ((3, 0), (2,)), ((7, 1), (6,)), ((8,), ())]


def test_three_rows_in_four_micro_batches_leave_one_empty():
    (step,) = plan_steps(np.array([5, 6, 7]), BatchSettings(batch_rows=8, micro_batches=4))
    assert [len(part) for part in step.micro_batches] == [1, 1, 1, 0]


def test_grouping_by_length_saves_most_padding_and_still_mixes_batches():
    lengths = np.random.default_rng(0).integers(5, 120, size=1000)
    plain = batch_shapes(lengths, BatchSettings(batch_rows=16, group_by_length=False))
    grouped = batch_shapes(lengths, BatchSettings(batch_rows=16))
    assert plain.padding_share > 0.25
    assert grouped.padding_share < 0.05
    means = [lengths[list(step.rows)].mean() for step in epoch_steps(lengths, BatchSettings(batch_rows=16), 0)]
    falling = sum(one > two for one, two in pairwise(means)) / (len(means) - 1)
    assert 0.3 < falling < 0.7
    one, two = (epoch_steps(lengths, BatchSettings(batch_rows=16), epoch) for epoch in (0, 1))
    assert not {frozenset(step.rows) for step in one} & {frozenset(step.rows) for step in two}


@RELAXED
@given(LENGTHS, SETTINGS, st.sampled_from([1, 8]))
def test_shapes_describe_what_the_steps_hold(lengths, order, multiple):
    shapes = batch_shapes(lengths, order, pad_to_multiple=multiple)
    assert lengths.max() <= shapes.memory_tokens < lengths.max() + multiple
    assert shapes.row_tokens == lengths.sum() * order.epochs
    assert shapes.padded_tokens >= shapes.row_tokens
    assert shapes.typical_tokens <= shapes.memory_tokens
    assert shapes.largest_micro_batch_rows == -(-min(order.batch_rows, len(lengths)) // order.micro_batches)
    assert shapes.steps == len(list(plan_steps(lengths, order)))


def test_evaluation_takes_every_row_once_longest_first():
    batches = evaluation_batches(np.array([3, 9, 5, 9, 1]), 2)
    assert batches == ((1, 3), (2, 0), (4,))


def test_no_rows_and_impossible_settings_are_refused():
    with pytest.raises(DataError, match="no rows"):
        list(plan_steps(np.array([], dtype=int), BatchSettings()))
    with pytest.raises(RecipeError, match="micro_batches is 0"):
        BatchSettings(micro_batches=0)
