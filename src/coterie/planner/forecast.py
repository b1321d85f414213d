"""What would happen in mid-run if a device slowed down, before there is a run."""

import msgspec

from coterie.ids import WorkerId
from coterie.planner.capacity import Capacities, WorkerPace, rescaled
from coterie.planner.decide import make_plan, repredicted
from coterie.planner.plan import Plan
from coterie.planner.problem import UNMEASURED_BYTES_PER_S
from coterie.planner.rebalance import Rebalance, unit_bytes, weigh
from coterie.planner.request import PlanRequest, stages_of

USUAL_REBUILD_S = 5.0
"""From the last byte until all stages stand; a run measures its own."""


def if_slower(plan: Plan, request: PlanRequest, worker: WorkerId, times: float, *, remaining_steps: int) -> Rebalance:
    """What the run of `plan` would do if one of its devices took so many times as long from now on.

    Args:
        plan: Made for `request`.
        request: With devices and links.
        worker: Which one slows down.
        times: Its seconds over those of before.
        remaining_steps: Of the run.
    """
    slow = Capacities(paces=(WorkerPace(worker=worker, factor=times),))
    then = msgspec.structs.replace(
        request,
        cluster=rescaled(request.cluster, slow),
        micro_batches=plan.micro_batches,
        keep=stages_of(plan),
        version=plan.version + 1,
    )
    rates = [link.bytes_per_s for link in request.cluster.links]
    return weigh(
        repredicted(plan, then),
        make_plan(then),
        remaining_steps=remaining_steps,
        moved_bytes_per_s=min(rates, default=UNMEASURED_BYTES_PER_S),
        unit_bytes=unit_bytes(request.model, request.optimizer_state_copies),
        rebuild_s=USUAL_REBUILD_S,
    )
