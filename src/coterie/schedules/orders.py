"""The five orders: `gpipe`, `flush` (1F1B, emptied each step), `stash` (PipeDream), `2bw`, `forward`.

Backwards always run in the order of the forwards, under `gpipe` too: gradients of a step are then summed in one order
by every schedule and on one device, which keeps the results bit-equal.
"""

from collections.abc import Iterator
from itertools import pairwise

from coterie.errors import ScheduleError
from coterie.schedules.actions import Action, Schedule, ScheduleKind


def default_in_flight(kind: ScheduleKind, *, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches that each stage may have forwarded and not yet backwarded: PipeDream's `S - s` for 1F1B."""
    match kind:
        case "forward":
            return (0,) * stages
        case "gpipe":
            return (micro_batches,) * stages
        case "flush" | "2bw":
            return tuple(min(stages - stage, micro_batches) for stage in range(stages))
        case "stash":
            return tuple(stages - stage for stage in range(stages))


def make_schedule(
    kind: ScheduleKind,
    *,
    stages: int,
    micro_batches: int,
    steps: int = 1,
    in_flight: tuple[int, ...] | None = None,
) -> Schedule:
    """Order the actions of one segment of `steps` optimizer steps.

    - `gpipe`: all forwards of a step, all its backwards, the update.
    - `flush`: 1F1B within a step, then the update; the pipeline is empty after each step.
    - `stash`: 1F1B over the whole segment, an update after every micro-batch's backward (METHODS 1, PipeDream).
    - `2bw`: 1F1B over the whole segment, one update a step; step t's gradients are taken at the version before the
      newest, `W(t+1) = W(t) - f(gradient at W(t-1))`, on every stage. A segment's first step has no older version and
      uses `W(0)`.
    - `forward`: forwards only.

    Args:
        kind: Which order.
        stages: S, at least 1.
        micro_batches: Micro-batches of a step, at least 1; may be fewer than the stages except under `2bw`.
        steps: Optimizer steps in the segment.
        in_flight: Depth of each stage; deeper than `S - s` hides a slow link, shallower saves memory. Never rising from
            one stage to the next. None takes `default_in_flight`.

    Raises:
        ScheduleError: The sizes or depths do not make a schedule.
    """
    if min(stages, micro_batches, steps) < 1:
        raise ScheduleError(
            f"a schedule of {stages} stages, {micro_batches} micro-batches and {steps} steps is empty",
            hint="all three are at least 1",
        )
    if kind == "2bw" and micro_batches < stages:
        raise ScheduleError(
            f"2bw needs at least as many micro-batches as stages, not {micro_batches} for {stages} stages",
            hint=f"take {stages} or more micro-batches, fewer stages, or the flush schedule",
        )
    depths = _depths(kind, stages, micro_batches, in_flight)
    actions = tuple(_stage_actions(kind, depth, micro_batches, steps) for depth in depths)
    return Schedule(kind=kind, stages=stages, micro_batches=micro_batches, steps=steps, actions=actions)


def _depths(kind: ScheduleKind, stages: int, micro_batches: int, in_flight: tuple[int, ...] | None) -> tuple[int, ...]:
    if in_flight is None or kind == "forward":
        return default_in_flight(kind, stages=stages, micro_batches=micro_batches)
    if len(in_flight) != stages or min(in_flight) < 1:
        raise ScheduleError(
            f"in-flight depths {in_flight} do not give each of {stages} stages a depth of 1 or more",
            hint="give one depth per stage",
        )
    if kind == "gpipe" and min(in_flight) < micro_batches:
        raise ScheduleError(
            f"gpipe keeps all {micro_batches} micro-batches in flight; depths {in_flight} forbid it",
            hint="use the flush schedule to keep fewer in flight",
        )
    depths = in_flight if kind == "stash" else tuple(min(depth, micro_batches) for depth in in_flight)
    if any(later > earlier for earlier, later in pairwise(depths)):
        raise ScheduleError(
            f"in-flight depths {in_flight} would deadlock: a later stage waits for more forwards than an earlier sends",
            hint="let depths fall or stay equal from the first stage to the last",
        )
    return depths


def _stage_actions(kind: ScheduleKind, depth: int, micro_batches: int, steps: int) -> tuple[Action, ...]:
    match kind:
        case "forward":
            order = (
                Action(kind="F", step=step, micro_batch=micro_batch)
                for step in range(steps)
                for micro_batch in range(micro_batches)
            )
            return tuple(order)
        case "flush" | "gpipe":
            return tuple(
                action
                for step in range(steps)
                for action in _one_forward_one_backward(kind, depth, micro_batches, range(step, step + 1))
            )
        case "stash" | "2bw":
            return tuple(_one_forward_one_backward(kind, depth, micro_batches, range(steps)))


def _one_forward_one_backward(kind: ScheduleKind, depth: int, micro_batches: int, steps: range) -> Iterator[Action]:
    """1F1B over `steps`: `depth - 1` forwards ahead, then forward and backward in turn, then the backwards left."""
    first, stop = steps.start * micro_batches, steps.stop * micro_batches
    ahead = depth - 1
    used: dict[int, int] = {}
    updates = steps.start
    for index in range(first, stop + ahead):
        if index < stop:
            step, micro_batch = divmod(index, micro_batches)
            used[index] = max(step - 1, 0) if kind == "2bw" else updates
            yield Action(kind="F", step=step, micro_batch=micro_batch, weight_version=used[index])
        done = index - ahead
        if first <= done < stop:
            step, micro_batch = divmod(done, micro_batches)
            yield Action(kind="B", step=step, micro_batch=micro_batch, weight_version=used.pop(done))
            if kind == "stash" or micro_batch == micro_batches - 1:
                updates += 1
                yield Action(kind="U", step=step, micro_batch=micro_batch, weight_version=updates)
