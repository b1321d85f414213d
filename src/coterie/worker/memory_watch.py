"""What a stage does when memory gets scarce, in the order of what it costs. Pure: no clock, no process.

First it recomputes, from the next micro-batch on; then it holds fewer micro-batches in flight, from the next step on;
then it asks for a smaller stage. Fewer in flight than in the next stage it cannot hold alone: that one would wait for a
forward, and this one for its backward, for ever; what is below needs the neighbours' agreement, that is another plan.
Each rung changes no number. When there is room again it goes back up, but only with some to spare and after a while.
"""

import msgspec

from coterie.cluster.fault_messages import MemoryLow
from coterie.cluster.messages import Assign
from coterie.measure.budget import MemoryBudget
from coterie.planner.memory import MemorySettings, estimate_memory
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.model_profile import ModelProfile

CALM_S = 20.0
"""How long there must be room before a rung is climbed: other programs come and go."""

ROOM_PERCENT = 110
"""Of what the rung above takes, there must be so much room."""

LOWER_PERCENT = 90
"""A limit below so much of what was told last is told anew: it falls in small steps while others grow."""

HIGHER_PERCENT = 125
"""A limit above so much of what was told last is told anew, when it has lasted."""


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the stage, and the predicted peak of its process then."""

    recompute: bool
    in_flight: int
    bytes: int


class WatchState(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided before.

    Attributes:
        rung: Index of the rung that the stage is on.
        told_bytes: The limit that the coordinator was told last; None: none.
        roomy_since_s: Since when there has been room for a rung further up, or for more than was told.
    """

    rung: int = 0
    told_bytes: int | None = None
    roomy_since_s: float | None = None


def rungs_of(assign: Assign, model: ModelProfile | None, shared: SharedMemory) -> tuple[Rung, ...]:
    """The ways to run a stage, the plan's first; without the model's profile only that one is known.

    A way that would not take less than the one before is left out.
    """
    place = assign.plan.stages[assign.stage]
    ways = [Rung(recompute=place.recompute, in_flight=place.in_flight, bytes=place.memory.total)]
    if model is None or assign.side is not None or assign.plan.schedule == "forward":
        return tuple(ways)
    for recompute, in_flight in _ladder(assign):
        estimate = estimate_memory(
            model,
            (place.first_unit, place.stop_unit),
            rows=-(-assign.plan.batch_rows // assign.plan.micro_batches),
            in_flight=in_flight,
            settings=MemorySettings(
                schedule=assign.plan.schedule,
                optimizer_state_copies=assign.optimizer.state_copies,
                recompute=recompute,
                allocator=place.allocator,
                accumulates=assign.plan.micro_batches > 1,
                shared=shared,
            ),
            base_bytes=place.memory.base,
        )
        if estimate.total < ways[-1].bytes:
            ways.append(Rung(recompute=recompute, in_flight=in_flight, bytes=estimate.total))
    return tuple(ways)


def _ladder(assign: Assign) -> list[tuple[bool, int]]:
    """Recomputation, then as few micro-batches in flight as the next stage allows.

    Under `stash` and `2bw` the depth decides which weights a gradient is taken at; it is the plan's alone.
    """
    stages = assign.plan.stages
    place = stages[assign.stage]
    fewest = place.in_flight
    if assign.plan.schedule == "flush":
        after = stages[assign.stage + 1].in_flight if assign.stage + 1 < len(stages) else 1
        fewest = min(max(after, 1), place.in_flight)
    return [(True, place.in_flight), (True, fewest)]


def decide(
    state: WatchState, rungs: tuple[Rung, ...], limit: MemoryBudget, now_s: float, *, excess_bytes: int = 0
) -> tuple[WatchState, MemoryLow | None]:
    """The rung to be on from now on, and what to tell the coordinator.

    Args:
        state: What was decided before.
        rungs: The ways to run the stage; empty: there is none.
        limit: What the process may use in all now.
        now_s: Monotonic seconds.
        excess_bytes: By how much the stage has exceeded its prediction so far.
    """
    needs = [rung.bytes + excess_bytes for rung in rungs]
    fitting = next((number for number, need in enumerate(needs) if need <= limit.bytes), len(needs) - 1)
    low = bool(needs) and needs[-1] > limit.bytes
    if low or fitting > state.rung:
        state = msgspec.structs.replace(state, rung=max(fitting, state.rung), roomy_since_s=None)
        is_news = state.told_bytes is None or limit.bytes * 100 < state.told_bytes * LOWER_PERCENT
        if not low or not is_news:
            return state, None
        return msgspec.structs.replace(state, told_bytes=limit.bytes), _told(state, rungs, limit)
    return _with_room(state, rungs, _highest(needs, limit.bytes, state.rung), limit, now_s)


def noticed(state: WatchState, rungs: tuple[Rung, ...], *, recomputes: bool) -> WatchState:
    """The state if the stage has begun to recompute by itself: it ran short before anybody could see it coming."""
    if not recomputes or not rungs or rungs[state.rung].recompute:
        return state
    rung = next((number for number, rung in enumerate(rungs) if rung.recompute), state.rung)
    return msgspec.structs.replace(state, rung=rung, roomy_since_s=None)


def _highest(needs: list[int], limit_bytes: int, rung: int) -> int:
    """The highest rung for which there is room to spare; `rung` if there is none above it."""
    return next((number for number, need in enumerate(needs) if need * ROOM_PERCENT <= limit_bytes * 100), rung)


def _with_room(
    state: WatchState, rungs: tuple[Rung, ...], highest: int, limit: MemoryBudget, now_s: float
) -> tuple[WatchState, MemoryLow | None]:
    """It fits: climb, or tell that more may be used again, if that has lasted."""
    more = state.told_bytes is not None and limit.bytes * 100 >= state.told_bytes * HIGHER_PERCENT
    if highest >= state.rung and not more:
        return msgspec.structs.replace(state, roomy_since_s=None), None
    if state.roomy_since_s is None:
        return msgspec.structs.replace(state, roomy_since_s=now_s), None
    if now_s - state.roomy_since_s < CALM_S:
        return state, None
    state = msgspec.structs.replace(state, rung=min(highest, state.rung), roomy_since_s=None)
    if not more:
        return state, None
    # Told only once: by how much it rises further matters only after it was low again.
    return msgspec.structs.replace(state, told_bytes=None), _told(state, rungs, limit)


def _told(state: WatchState, rungs: tuple[Rung, ...], limit: MemoryBudget) -> MemoryLow:
    recomputes = bool(rungs) and rungs[state.rung].recompute
    return MemoryLow(limit_bytes=limit.bytes, reason=limit.why, recomputes=recomputes)
