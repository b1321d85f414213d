"""What each order must be, said with literals and checked at every size."""

import cProfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ScheduleError
from coterie.schedules import (
    Schedule,
    ScheduleKind,
    check,
    default_in_flight,
    last_uses,
    make_schedule,
    peak_in_flight,
    staleness,
    weight_versions,
)

KINDS: tuple[ScheduleKind, ...] = ("flush", "gpipe", "stash", "2bw", "forward")


def order(schedule: Schedule, stage: int) -> str:
    return " ".join(
        action.kind + (str(action.step * schedule.micro_batches + action.micro_batch) if action.kind != "U" else "")
        for action in schedule.actions[stage]
    )


def versions(schedule: Schedule, stage: int, kind: str) -> list[int]:
    return [action.weight_version for action in schedule.actions[stage] if action.kind == kind]


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, object]:
    kind = draw(st.sampled_from(KINDS))
    stages = draw(st.integers(1, 6))
    fewest = stages if kind == "2bw" else 1
    micro_batches = draw(st.integers(fewest, fewest + 8))
    in_flight = None
    if kind != "gpipe" and draw(st.booleans()):
        in_flight = tuple(sorted((draw(st.integers(1, 9)) for _ in range(stages)), reverse=True))
    return {
        "kind": kind,
        "stages": stages,
        "micro_batches": micro_batches,
        "steps": draw(st.integers(1, 5)),
        "in_flight": in_flight,
    }


@given(sizes())
def test_every_schedule_that_is_made_passes_the_check_within_its_depths(size):
    schedule = make_schedule(**size)
    depths = size["in_flight"] or default_in_flight(
        size["kind"], stages=size["stages"], micro_batches=size["micro_batches"]
    )
    check(schedule, in_flight=depths if size["kind"] != "forward" else None)


@given(sizes())
def test_backwards_run_in_the_order_of_the_forwards(size):
    schedule = make_schedule(**size)
    expected = [(step, mb) for step in range(schedule.steps) for mb in range(schedule.micro_batches)]
    for actions in schedule.actions:
        assert [(a.step, a.micro_batch) for a in actions if a.kind == "F"] == expected
        if schedule.kind != "forward":
            assert [(a.step, a.micro_batch) for a in actions if a.kind == "B"] == expected


def test_flush_is_one_forward_one_backward_and_empties_before_the_update():
    schedule = make_schedule("flush", stages=3, micro_batches=4, steps=2)
    assert order(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3 U F4 F5 F6 B4 F7 B5 B6 B7 U"
    assert order(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3 U F4 F5 B4 F6 B5 F7 B6 B7 U"
    assert order(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 U F4 B4 F5 B5 F6 B6 F7 B7 U"
    assert versions(schedule, 0, "F") == versions(schedule, 0, "B") == [0] * 4 + [1] * 4
    assert versions(schedule, 0, "U") == [1, 2]


def test_gpipe_runs_all_forwards_then_all_backwards():
    schedule = make_schedule("gpipe", stages=2, micro_batches=3)
    assert order(schedule, 0) == order(schedule, 1) == "F0 F1 F2 B0 B1 B2 U"


def test_stash_updates_after_every_backward_and_remembers_the_version_of_each_forward():
    schedule = make_schedule("stash", stages=3, micro_batches=2, steps=2)
    assert order(schedule, 0) == "F0 F1 F2 B0 U F3 B1 U B2 U B3 U"
    assert versions(schedule, 0, "F") == [0, 0, 0, 1]
    assert order(schedule, 2) == "F0 B0 U F1 B1 U F2 B2 U F3 B3 U"
    assert versions(schedule, 2, "F") == [0, 1, 2, 3]


def test_two_buffered_weights_lag_one_step_on_every_stage():
    schedule = make_schedule("2bw", stages=3, micro_batches=4, steps=4)
    for stage in range(3):
        # Step 0 has no older version; step t >= 1 computes with the version before the newest.
        assert versions(schedule, stage, "F") == [0] * 8 + [1] * 4 + [2] * 4
        assert versions(schedule, stage, "U") == [1, 2, 3, 4]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_staleness_versions_and_depth_are_those_of_the_method(stages):
    made = {
        kind: make_schedule(kind, stages=stages, micro_batches=6, steps=6)
        for kind in ("flush", "gpipe", "stash", "2bw")
    }
    for stage in range(stages):
        left = stages - stage
        figures = {
            kind: (staleness(s, stage), weight_versions(s, stage), peak_in_flight(s, stage)) for kind, s in made.items()
        }
        assert figures == {
            "flush": (0, 1, left),
            "gpipe": (0, 1, 6),
            "stash": (left - 1, left, left),
            "2bw": (1, 2, left),
        }


def test_a_deeper_stash_is_staler_and_keeps_more_versions():
    schedule = make_schedule("stash", stages=2, micro_batches=8, steps=4, in_flight=(4, 3))
    assert [staleness(schedule, stage) for stage in range(2)] == [3, 2]
    assert [weight_versions(schedule, stage) for stage in range(2)] == [4, 3]
    assert [peak_in_flight(schedule, stage) for stage in range(2)] == [4, 3]


def test_a_depth_of_one_on_every_stage_runs_one_micro_batch_at_a_time():
    schedule = make_schedule("flush", stages=3, micro_batches=3, in_flight=(1, 1, 1))
    assert order(schedule, 0) == order(schedule, 2) == "F0 B0 F1 B1 F2 B2 U"
    check(schedule, in_flight=(1, 1, 1))


def test_fewer_micro_batches_than_stages_is_a_shallower_flush():
    schedule = make_schedule("flush", stages=4, micro_batches=2)
    assert [peak_in_flight(schedule, stage) for stage in range(4)] == [2, 2, 2, 1]


def test_forward_only_keeps_nothing():
    schedule = make_schedule("forward", stages=2, micro_batches=2, steps=2)
    assert order(schedule, 0) == "F0 F1 F2 F3"
    assert peak_in_flight(schedule, 0) == 0
    assert weight_versions(schedule, 0) == 1


def test_the_last_use_of_a_version_is_its_last_forward_or_backward():
    schedule = make_schedule("stash", stages=2, micro_batches=3)
    assert order(schedule, 0) == "F0 F1 B0 U F2 B1 U B2 U"
    assert last_uses(schedule, 0) == {0: 5, 1: 7}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "2bw", "stages": 4, "micro_batches": 3}, "at least as many micro-batches"),
        ({"kind": "flush", "stages": 0, "micro_batches": 3}, "empty"),
        ({"kind": "flush", "stages": 2, "micro_batches": 0}, "empty"),
        ({"kind": "flush", "stages": 2, "micro_batches": 4, "in_flight": (1, 2)}, "would deadlock"),
        ({"kind": "flush", "stages": 2, "micro_batches": 4, "in_flight": (2,)}, "depth"),
        ({"kind": "flush", "stages": 2, "micro_batches": 4, "in_flight": (2, 0)}, "depth"),
        ({"kind": "gpipe", "stages": 2, "micro_batches": 4, "in_flight": (2, 2)}, "keeps all 4"),
    ],
)
def test_sizes_that_make_no_schedule_are_refused(arguments, words):
    with pytest.raises(ScheduleError, match=words) as caught:
        make_schedule(**arguments)
    assert caught.value.hint


def test_ten_times_as_many_actions_are_made_and_checked_with_ten_times_as_many_calls():
    def calls(steps):
        profile = cProfile.Profile()
        profile.runcall(lambda: check(make_schedule("stash", stages=4, micro_batches=8, steps=steps)))
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(200) < 11 * calls(20)
