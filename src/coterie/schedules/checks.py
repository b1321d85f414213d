"""Is a schedule complete, free of deadlock, and does every backward meet the weights of its forward?"""

from collections import Counter
from typing import get_args

from coterie.errors import ScheduleError
from coterie.schedules.actions import Action, ActionKind, Schedule
from coterie.schedules.figures import peak_in_flight


def check(schedule: Schedule, *, in_flight: tuple[int, ...] | None = None) -> None:
    """Verify a schedule before it runs.

    Checked: each stage runs every forward, backward and update exactly once; a backward follows its forward, uses its
    weights, and an update follows the backwards it sums; versions count the updates; links carry micro-batches in the
    order in which the other end takes them; nobody waits for ever (updates of `flush` and `gpipe` wait for one another,
    since the stages add up their gradients' norm).

    Args:
        schedule: The schedule.
        in_flight: Most micro-batches in flight that each stage's memory was planned for.

    Raises:
        ScheduleError: One of these does not hold; the message names stage and action.
    """
    if len(schedule.actions) != schedule.stages:
        raise _wrong(f"{len(schedule.actions)} lists of actions for {schedule.stages} stages")
    for stage in range(schedule.stages):
        _check_complete(schedule, stage)
        _check_versions(schedule, stage)
    for kind in get_args(ActionKind):
        _check_link_order(schedule, kind)
    _check_no_deadlock(schedule)
    if in_flight is not None:
        for stage, limit in enumerate(in_flight):
            peak = peak_in_flight(schedule, stage)
            if peak > limit:
                raise _wrong(f"stage {stage} has {peak} micro-batches in flight; its memory was planned for {limit}")


def _wrong(message: str) -> ScheduleError:
    return ScheduleError(message, hint="make schedules with make_schedule, or mend this one's order")


def describe(action: Action) -> str:
    """An action in a sentence: `F of step 3, micro-batch 1`."""
    return f"{action.kind} of step {action.step}, micro-batch {action.micro_batch}"


def _check_complete(schedule: Schedule, stage: int) -> None:
    cells = [(step, mb) for step in range(schedule.steps) for mb in range(schedule.micro_batches)]
    expected: set[tuple[ActionKind, int, int]] = {("F", step, mb) for step, mb in cells}
    if schedule.kind != "forward":
        expected |= {("B", step, mb) for step, mb in cells}
        each = schedule.kind == "stash"
        expected |= {("U", step, mb) for step, mb in cells if each or mb == schedule.micro_batches - 1}
    counts = Counter((action.kind, action.step, action.micro_batch) for action in schedule.actions[stage])
    if counts.keys() == expected and len(schedule.actions[stage]) == len(expected):
        return
    for kind, step, mb in sorted(expected | counts.keys()):
        times = counts[kind, step, mb]
        wanted = int((kind, step, mb) in expected)
        if times != wanted:
            name = describe(Action(kind=kind, step=step, micro_batch=mb))
            raise _wrong(f"stage {stage} has {name} {times} times instead of {wanted}")


def _check_versions(schedule: Schedule, stage: int) -> None:
    """Own order of one stage: forward before backward before update, and the version each of them names."""
    forwards: dict[tuple[int, int], int] = {}
    backwards_of_step: Counter[int] = Counter()
    newest = 0
    for action in schedule.actions[stage]:
        key = (action.step, action.micro_batch)
        if action.kind == "F":
            expected = max(action.step - 1, 0) if schedule.kind == "2bw" else newest
            forwards[key] = action.weight_version
            if expected > newest:
                raise _wrong(f"stage {stage}: {describe(action)} needs version {expected}, before it is made")
        elif action.kind == "B":
            if key not in forwards:
                raise _wrong(f"stage {stage}: {describe(action)} comes before its forward")
            expected = forwards[key]
            backwards_of_step[action.step] += 1
        else:
            newest += 1
            expected = newest
            due = action.micro_batch + 1
            if backwards_of_step[action.step] != due:
                raise _wrong(
                    f"stage {stage}: {describe(action)} applies {due} gradients of its step "
                    f"after {backwards_of_step[action.step]} backwards"
                )
        if action.weight_version != expected:
            raise _wrong(f"stage {stage}: {describe(action)} names version {action.weight_version} for {expected}")


def _check_link_order(schedule: Schedule, kind: ActionKind) -> None:
    orders = [[(a.step, a.micro_batch) for a in actions if a.kind == kind] for actions in schedule.actions]
    for stage, order in enumerate(orders[1:], start=1):
        if order != orders[stage - 1]:
            raise _wrong(f"stages {stage - 1} and {stage} run their {kind} actions in different orders")


def _check_no_deadlock(schedule: Schedule) -> None:
    """Let every stage go as far as it can until all are done or nobody moves."""
    progress = _Progress(schedule)
    position = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.actions):
            while position[stage] < len(actions) and progress.advance(stage, actions[position[stage]]):
                position[stage] += 1
                moved = True
    for stage, actions in enumerate(schedule.actions):
        if position[stage] < len(actions):
            raise _wrong(f"deadlock: stage {stage} waits for ever at {describe(actions[position[stage]])}")


class _Progress:
    """How many forwards and backwards each stage has done; links keep their order, so the counts tell which."""

    def __init__(self, schedule: Schedule) -> None:
        self.last = schedule.stages - 1
        self.micro_batches = schedule.micro_batches
        self.joint_updates = schedule.kind in {"flush", "gpipe"}
        self.forwards = [0] * schedule.stages
        self.backwards = [0] * schedule.stages

    def advance(self, stage: int, action: Action) -> bool:
        """Do `action` if what it waits for is there; False if it is not."""
        match action.kind:
            case "F":
                if stage > 0 and self.forwards[stage - 1] <= self.forwards[stage]:
                    return False
                self.forwards[stage] += 1
            case "B":
                if stage < self.last and self.backwards[stage + 1] <= self.backwards[stage]:
                    return False
                self.backwards[stage] += 1
            case "U":
                return not self.joint_updates or min(self.backwards) >= (action.step + 1) * self.micro_batches
        return True
