"""The plan of a side-tuning run's devices: a forward-only pipeline over the backbone, without what the server has."""

import msgspec

from coterie.coordinator.job import Job
from coterie.coordinator.planning import plan_request
from coterie.planner import explain, make_plan
from coterie.planner.plan import Plan
from coterie.profiles.cluster_profile import ClusterProfile
from coterie.profiles.model_profile import ModelProfile


def make_side_plan(job: Job, cluster: ClusterProfile, *, micro_batches: int | None = None) -> tuple[Plan, str]:
    """Plan the devices. In additive mode they hold the output layer, too: differences are taken there.

    Raises:
        DoesNotFitError: No plan fits.
    """
    names = {device.worker for device in cluster.devices}
    links = tuple(link for link in cluster.links if {link.source, link.target} <= names)
    request = plan_request(
        job.recipe,
        job.model_profile if job.recipe.side.additive else _without_output(job.model_profile),
        msgspec.structs.replace(cluster, links=links),
        micro_batches=micro_batches,
        forward_only=True,
    )
    plan = msgspec.structs.replace(make_plan(request), units=len(job.model_profile.layers))
    return plan, explain(plan, request)


def _without_output(model: ModelProfile) -> ModelProfile:
    return msgspec.structs.replace(model, layers=model.layers[:-1], tied=False, tied_bytes=0)
