"""Simulated seconds against sums done by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ScheduleError
from coterie.schedules import Schedule, StageTimes, make_schedule, render, simulate_times


def times(*per_stage: tuple[float, float], **others: float) -> list[StageTimes]:
    return [StageTimes(forward_s=f, backward_s=b, **others) for f, b in per_stage]


def test_equal_stages_have_the_textbook_bubble():
    schedule = make_schedule("flush", stages=3, micro_batches=5)
    timeline = simulate_times(schedule, times(*[(1, 2)] * 3))
    assert timeline.end_s == pytest.approx((5 + 3 - 1) * 3)
    assert timeline.busy_s == pytest.approx((15, 15, 15))
    assert timeline.idle_s == pytest.approx((6, 6, 6))


def test_gpipe_and_flush_take_equally_long_on_free_links():
    ends = [
        simulate_times(make_schedule(kind, stages=4, micro_batches=6, steps=2), times(*[(1, 2)] * 4)).end_s
        for kind in ("gpipe", "flush")
    ]
    assert ends[0] == pytest.approx(ends[1])


def test_the_slowest_stage_sets_the_pace_of_a_stash():
    schedule = make_schedule("stash", stages=3, micro_batches=4, steps=20)
    timeline = simulate_times(schedule, times((1, 1), (2, 3), (1, 1), update_s=0.5))
    assert timeline.steady_step_s == pytest.approx(4 * 5.5)
    assert len(timeline.step_end_s) == 20


def test_a_transfer_that_takes_longer_than_computing_sets_the_pace_only_if_enough_are_in_flight():
    slow_link = times((1, 1), (1, 1), send_s=3, send_back_s=3)
    textbook = simulate_times(make_schedule("stash", stages=2, micro_batches=4, steps=30), slow_link)
    deeper = make_schedule("stash", stages=2, micro_batches=4, steps=30, in_flight=(6, 1))
    assert textbook.steady_step_s == pytest.approx(4 * (3 + 2 + 3 + 2) / 2)
    assert simulate_times(deeper, slow_link).steady_step_s == pytest.approx(4 * 3)


def test_latency_delays_but_does_not_occupy_the_link():
    schedule = make_schedule("forward", stages=2, micro_batches=3)
    timeline = simulate_times(schedule, times((1, 0), (1, 0), send_s=2, latency_s=10))
    assert timeline.start_s[1] == pytest.approx((13, 15, 17))


def test_the_way_back_has_its_own_time():
    schedule = make_schedule("flush", stages=2, micro_batches=1)
    timeline = simulate_times(schedule, times((1, 1), (1, 1), send_s=2, send_back_s=5))
    assert timeline.start_s[0][1] == pytest.approx(1 + 2 + 2 + 5)


def test_updates_of_a_flush_start_together():
    schedule = make_schedule("flush", stages=2, micro_batches=2)
    timeline = simulate_times(schedule, times((1, 1), (1, 1), update_s=4))
    assert timeline.start_s[0][-1] == timeline.start_s[1][-1]
    assert timeline.end_s == pytest.approx(6 + 4)


@given(
    kind=st.sampled_from(["flush", "gpipe", "stash", "2bw"]),
    stages=st.integers(1, 4),
    extra=st.integers(0, 4),
    steps=st.integers(1, 3),
    seconds=st.lists(st.floats(0, 5), min_size=4, max_size=4),
)
def test_no_action_starts_before_its_input_has_arrived(kind, stages, extra, steps, seconds):
    schedule = make_schedule(kind, stages=stages, micro_batches=stages + extra, steps=steps)
    step = StageTimes(
        forward_s=seconds[0], backward_s=seconds[1], send_s=seconds[2], send_back_s=seconds[2], latency_s=seconds[3]
    )
    timeline = simulate_times(schedule, [step] * stages)
    when = {
        (stage, a.kind, a.step, a.micro_batch): span
        for stage in range(stages)
        for a, *span in zip(schedule.actions[stage], timeline.start_s[stage], timeline.stop_s[stage], strict=True)
    }
    way = seconds[2] + seconds[3]
    for (stage, action, *cell), (start, _) in when.items():
        if action == "F" and stage > 0:
            assert start >= when[stage - 1, "F", *cell][1] + way - 1e-9
        if action == "B":
            assert start >= when[stage, "F", *cell][1]
            if stage < stages - 1:
                assert start >= when[stage + 1, "B", *cell][1] + way - 1e-9


def test_a_schedule_that_deadlocks_is_named_not_waited_for():
    shallow = make_schedule("flush", stages=2, micro_batches=3, in_flight=(1, 1))
    deep = make_schedule("flush", stages=2, micro_batches=3, in_flight=(2, 2))
    crossed = Schedule(kind="flush", stages=2, micro_batches=3, steps=1, actions=(shallow.actions[0], deep.actions[1]))
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate_times(crossed, times((1, 1), (1, 1)))


def test_times_for_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError, match="2 stages' times for a schedule of 3 stages"):
        simulate_times(make_schedule("flush", stages=3, micro_batches=3), times((1, 1), (1, 1)))


def test_the_grid_shows_the_schedule_slot_by_slot():
    assert render(make_schedule("flush", stages=2, micro_batches=2)).splitlines() == [
        "flush: 2 stages, 1 x 2 micro-batches",
        "",
        "        0  1  2  3  4  5  6",
        "stage 0 F0 F1 .  B0 .  B1 U",
        "stage 1 .  F0 B0 F1 B1 .  U",
    ]


def test_a_long_schedule_goes_on_below_and_is_cut_with_a_word():
    text = render(make_schedule("stash", stages=2, micro_batches=4, steps=50), width=80, max_slots=60)
    assert max(map(len, text.splitlines())) <= 80
    assert text.endswith("more slots")
