"""How often what is trained is copied, and to whom beside the coordinator. Pure."""

import math
from collections.abc import Collection, Mapping

from coterie.ids import WorkerId
from coterie.planner.plan import Plan
from coterie.planner.rebalance import UnitBytes

SMALL_BYTES = 16 * 1024**2
"""So little trained state is copied after every step: less than a second on a 200 Mbit/s network, in the background."""

MOST_PART = 0.03
"""Of the time that training takes, for copies of more than that."""

USUAL_BYTES_PER_S = 12.5e6
"""100 Mbit/s, since nobody measures the way to the coordinator."""

LOCAL_BYTES_PER_S = 250e6
"""Where all workers run on the coordinator's own machine; some GB/s go over loopback, but it computes beside that."""

IDLE_PART = 0.5
"""Of the time in which training leaves the link between two stages alone, for copies of their trained state."""

MEMORY_PART = 0.25
"""Of the coordinator's free memory at most, for the two copies that it holds while one replaces the other."""


def replicate_every(
    plan: Plan, units: tuple[UnitBytes, ...], *, wanted: int, free_bytes: int, bytes_per_s: float = USUAL_BYTES_PER_S
) -> int:
    """Optimizer steps between two copies; 0: none are made, since the coordinator could not hold them.

    Args:
        plan: The plan in effect.
        units: What each unit weighs.
        wanted: By the recipe; 0 leaves it to this function.
        free_bytes: Memory that the coordinator's machine has free.
        bytes_per_s: From a worker to the coordinator.
    """
    total_bytes = sum(unit.trained_bytes for unit in units)
    if 2 * total_bytes > MEMORY_PART * free_bytes:
        return 0
    if wanted:
        return wanted
    if total_bytes <= SMALL_BYTES:
        return 1
    largest = max(
        sum(unit.trained_bytes for unit in units[stage.first_unit : stage.stop_unit]) for stage in plan.stages
    )
    seconds = largest / bytes_per_s
    return max(math.ceil(seconds / (MOST_PART * max(plan.predicted_step_s, 1e-3))), 1)


def copy_peers(
    plan: Plan,
    units: tuple[UnitBytes, ...],
    every: int,
    *,
    owners: Collection[WorkerId],
    rates: Mapping[tuple[WorkerId, WorkerId], float],
) -> dict[WorkerId, WorkerId]:
    """Who sends copies of its trained state to whom: each stage to the next one, the last one to the one before it.

    A stage whose link has no time for that sends none: where activations keep it busy, copies would slow training.

    Args:
        plan: The plan that takes effect.
        units: What each unit weighs.
        every: Steps between two copies.
        owners: Workers on the data owner's own machine. Where data stay there, the ends send to nobody else: rows of
            an embedding that have changed tell which tokens the data hold.
        rates: Bytes per second of direct links, by source and target. Without one copies would go through the
            coordinator, which has them.
    """
    stages = plan.stages
    peers = {}
    for stage, beside in zip(stages, (*stages[1:], *stages[-2:-1]), strict=False):  # a single stage has nobody
        is_end = stage.stage in (0, len(stages) - 1)
        if plan.keeps_data_local and is_end and beside.worker not in owners:
            continue
        copy_bytes = sum(unit.trained_bytes for unit in units[stage.first_unit : stage.stop_unit])
        busy_s = plan.micro_batches * min(stage, beside, key=lambda one: one.stage).send_s
        idle_s = every * (plan.predicted_step_s - busy_s)
        if copy_bytes <= IDLE_PART * idle_s * rates.get((stage.worker, beside.worker), 0.0):
            peers[stage.worker] = beside.worker
    return peers
