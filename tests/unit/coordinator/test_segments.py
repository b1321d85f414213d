"""Where a run pauses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.coordinator.segments import boundaries, cut_segments


def test_a_run_pauses_at_checkpoints_and_at_the_ends_of_epochs():
    assert boundaries(0, 25, steps_per_epoch=10, checkpoint_every=4) == (4, 8, 10, 12, 16, 20, 24, 25)


def test_without_checkpoints_it_pauses_after_epochs_only():
    assert boundaries(0, 25, steps_per_epoch=10, checkpoint_every=0) == (10, 20, 25)


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 20), st.integers(0, 59))
def test_a_resumed_run_pauses_where_the_first_would_have(total, per_epoch, every, first):
    whole = boundaries(0, total, steps_per_epoch=per_epoch, checkpoint_every=every)
    resumed = boundaries(first, total, steps_per_epoch=per_epoch, checkpoint_every=every)
    assert resumed == tuple(point for point in whole if point > first)


@pytest.mark.parametrize("kind", ["flush", "gpipe", "stash", "2bw"])
@given(first=st.integers(0, 50), steps=st.integers(1, 50))
def test_segments_cover_the_steps_once_in_order(kind, first, steps):
    segments = cut_segments(kind, first, first + steps)
    assert [step for part in segments for step in range(part.first_step, part.stop_step)] == list(
        range(first, first + steps)
    )


def test_only_schedules_that_empty_the_pipeline_can_stop_after_any_step():
    assert len(cut_segments("flush", 3, 9)) == 6
    assert len(cut_segments("stash", 3, 9)) == 1
