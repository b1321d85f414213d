"""A schedule that is wrong in one way is refused for that reason."""

import msgspec
import pytest

from coterie.errors import ScheduleError
from coterie.schedules import Action, Schedule, check, make_schedule


def with_stage(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    changed = list(schedule.actions)
    changed[stage] = tuple(actions)
    return msgspec.structs.replace(schedule, actions=tuple(changed))


def swapped(schedule: Schedule, stage: int, first: int, second: int) -> Schedule:
    actions = list(schedule.actions[stage])
    actions[first], actions[second] = actions[second], actions[first]
    return with_stage(schedule, stage, actions)


FLUSH = make_schedule("flush", stages=2, micro_batches=3)  # F0 F1 B0 F2 B1 B2 U | F0 B0 F1 B1 F2 B2 U


def test_a_missing_backward_is_found():
    with pytest.raises(ScheduleError, match=r"stage 1 has B of step 0, micro-batch 2 0 times instead of 1"):
        check(with_stage(FLUSH, 1, [a for a in FLUSH.actions[1] if (a.kind, a.micro_batch) != ("B", 2)]))


def test_an_action_done_twice_is_found():
    with pytest.raises(ScheduleError, match=r"stage 0 has F of step 0, micro-batch 0 2 times"):
        check(with_stage(FLUSH, 0, [FLUSH.actions[0][0], *FLUSH.actions[0]]))


def test_an_action_of_another_step_is_found():
    extra = Action(kind="F", step=1, micro_batch=0)
    with pytest.raises(ScheduleError, match=r"F of step 1, micro-batch 0 1 times instead of 0"):
        check(with_stage(FLUSH, 0, [*FLUSH.actions[0], extra]))


def test_a_missing_stage_is_found():
    with pytest.raises(ScheduleError, match="1 lists of actions for 2 stages"):
        check(msgspec.structs.replace(FLUSH, actions=FLUSH.actions[:1]))


def test_a_backward_before_its_forward_is_found():
    with pytest.raises(ScheduleError, match="before its forward"):
        check(swapped(FLUSH, 1, 0, 1))


def test_an_update_before_the_last_backward_is_found():
    with pytest.raises(ScheduleError, match="applies 3 gradients of its step after 2 backwards"):
        check(swapped(FLUSH, 1, 5, 6))


def test_a_backward_with_other_weights_than_its_forward_is_found():
    stash = make_schedule("stash", stages=2, micro_batches=3)
    actions = [
        msgspec.structs.replace(a, weight_version=1) if (a.kind, a.micro_batch) == ("B", 1) else a
        for a in stash.actions[0]
    ]
    with pytest.raises(ScheduleError, match=r"stage 0: B of step 0, micro-batch 1 names version 1 for 0"):
        check(with_stage(stash, 0, actions))


def test_a_2bw_forward_with_the_newest_weights_is_found():
    two = make_schedule("2bw", stages=2, micro_batches=2, steps=3)
    actions = [
        msgspec.structs.replace(a, weight_version=2) if (a.kind, a.step, a.micro_batch) == ("F", 2, 1) else a
        for a in two.actions[1]
    ]
    with pytest.raises(ScheduleError, match="names version 2 for 1"):
        check(with_stage(two, 1, actions))


def test_stages_that_disagree_about_the_order_on_their_link_are_found():
    with pytest.raises(ScheduleError, match="stages 0 and 1 run their F actions in different orders"):
        check(swapped(FLUSH, 0, 0, 1))


def test_a_stage_that_waits_for_more_than_the_one_before_sends_is_a_deadlock():
    shallow = make_schedule("flush", stages=2, micro_batches=3, in_flight=(1, 1))
    deep = make_schedule("flush", stages=2, micro_batches=3, in_flight=(2, 2))
    with pytest.raises(ScheduleError, match=r"deadlock: stage 0 waits for ever at B of step 0, micro-batch 0"):
        check(msgspec.structs.replace(shallow, actions=(shallow.actions[0], deep.actions[1])))


def test_more_in_flight_than_memory_was_planned_for_is_found():
    check(FLUSH, in_flight=(2, 1))
    with pytest.raises(ScheduleError, match="stage 0 has 2 micro-batches in flight"):
        check(FLUSH, in_flight=(1, 1))


def test_a_schedule_survives_json():
    stash = make_schedule("stash", stages=3, micro_batches=2, steps=2)
    again = msgspec.json.decode(msgspec.json.encode(stash), type=Schedule)
    assert again == stash
