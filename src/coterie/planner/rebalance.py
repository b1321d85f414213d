"""Whether another plan is worth the moving: what it gains over the steps that are left, and what it costs."""

import msgspec

from coterie.ids import WorkerId
from coterie.planner.plan import Plan
from coterie.profiles.model_profile import ModelProfile
from coterie.units import counted, format_bytes, format_seconds

SAFETY = 1.1
"""The gain must exceed the cost by this factor: both are predictions."""

LEAST_GAIN_S = 1.0
"""And by this many seconds more: no run is stirred up for less."""

LEAST_PART = 0.02
"""A step must become shorter by more than this part; closer plans are equal to anybody who measures them."""


class UnitBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What travels of one unit: frozen tensors, and trained ones with their optimizer state."""

    frozen_bytes: int
    trained_bytes: int


class LayerMove(msgspec.Struct, frozen=True, kw_only=True):
    """One unit that another worker gets."""

    unit: int
    source: WorkerId
    target: WorkerId


class Rebalance(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate weighed against the plan in force.

    Attributes:
        plan: The candidate.
        gain_s: Seconds that it saves over the remaining steps.
        cost_s: Seconds in which nothing is trained because of the move.
        moves: Units that change hands.
        moved_bytes: What is sent for that.
        worth: Whether it should take effect.
        reason: One line for people, with the numbers.
    """

    plan: Plan
    gain_s: float
    cost_s: float
    moves: tuple[LayerMove, ...]
    moved_bytes: int
    worth: bool
    reason: str


def unit_bytes(model: ModelProfile, optimizer_state_copies: int) -> tuple[UnitBytes, ...]:
    """Of each unit, in order."""
    return tuple(
        UnitBytes(
            frozen_bytes=layer.parameter_bytes - layer.trainable_bytes,
            trained_bytes=layer.trainable_bytes * (1 + optimizer_state_copies),
        )
        for layer in model.layers
    )


def moves(current: Plan, candidate: Plan) -> tuple[LayerMove, ...]:
    """Units that change hands, in order."""
    before, after = _owners(current), _owners(candidate)
    return tuple(
        LayerMove(unit=unit, source=source, target=target)
        for unit, (source, target) in enumerate(zip(before, after, strict=True))
        if source != target
    )


def _owners(plan: Plan) -> list[WorkerId]:
    return [stage.worker for stage in plan.stages for _ in range(stage.first_unit, stage.stop_unit)]


def weigh(
    current: Plan,
    candidate: Plan,
    *,
    remaining_steps: int,
    moved_bytes_per_s: float,
    unit_bytes: tuple[UnitBytes, ...],
    rebuild_s: float,
) -> Rebalance:
    """Weigh a candidate against the plan in force, both with figures for the same speeds (see `repredicted`).

    A move costs the bytes (of units that change hands all, of the others the trained ones, which come anew from the
    last replica), the building of stages, and one step in which the pipeline runs dry and fills again.

    Args:
        current: The plan in force, predicted for the speeds measured now.
        candidate: Another one, predicted for the same.
        remaining_steps: Steps of the run that are left.
        moved_bytes_per_s: Speed of the slowest link that layers travel over.
        unit_bytes: Of each unit.
        rebuild_s: Seconds from the last byte until all stages stand.
    """
    moved = moves(current, candidate)
    changed = {move.unit for move in moved}
    moved_bytes = sum(
        unit.trained_bytes + (unit.frozen_bytes if number in changed else 0) for number, unit in enumerate(unit_bytes)
    )
    saved_s = current.predicted_step_s - candidate.predicted_step_s
    gain_s = saved_s * max(remaining_steps, 0)
    cost_s = moved_bytes / moved_bytes_per_s + rebuild_s + current.predicted_step_s
    worth = bool(moved) and saved_s > LEAST_PART * current.predicted_step_s and gain_s > SAFETY * cost_s + LEAST_GAIN_S
    return Rebalance(
        plan=candidate,
        gain_s=gain_s,
        cost_s=cost_s,
        moves=moved,
        moved_bytes=moved_bytes if moved else 0,
        worth=worth,
        reason=_reason(current, candidate, moved, (gain_s, cost_s, moved_bytes), remaining_steps),
    )


def _reason(
    current: Plan, candidate: Plan, moved: tuple[LayerMove, ...], figures: tuple[float, float, int], steps: int
) -> str:
    if not moved:
        return f"no other split is better: a step takes {format_seconds(current.predicted_step_s)}"
    gain_s, cost_s, moved_bytes = figures
    saved = (
        f"a step of {format_seconds(candidate.predicted_step_s)} instead of {format_seconds(current.predicted_step_s)}"
    )
    gain = f"{'saves' if gain_s >= 0 else 'loses'} {format_seconds(abs(gain_s))} in {counted(steps, 'step')}"
    return (
        f"moving {counted(len(moved), 'layer')} ({format_bytes(moved_bytes)} sent) gives {saved}, {gain} and costs "
        f"{format_seconds(cost_s)}"
    )
