"""From a recipe and its cluster to the planner's question, and back to a plan with its explanation. No torch."""

from typing import TYPE_CHECKING

import msgspec

from coterie.config.recipe import Recipe
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.planner import FixedStage, PlanRequest, explain, make_plan
from coterie.planner.plan import Codec, Plan
from coterie.profiles.cluster_profile import ClusterProfile
from coterie.profiles.model_profile import ModelProfile

if TYPE_CHECKING:
    from coterie.coordinator.job import Job


def make_job_plan(job: "Job", cluster: ClusterProfile, *, micro_batches: int | None = None) -> tuple[Plan, str]:
    """Plan a job on these devices. `micro_batches` is set when a run is resumed: it is part of its numbers.

    Raises:
        DoesNotFitError: No plan fits.
    """
    request = plan_request(
        job.recipe, job.model_profile, cluster, micro_batches=micro_batches, forward_only=job.forward_only
    )
    if job.prompts is not None:
        request = msgspec.structs.replace(request, kept_rows=request.batch_rows)
    plan = make_plan(request)
    return plan, explain(plan, request)


def plan_request(
    recipe: Recipe,
    model: ModelProfile,
    cluster: ClusterProfile,
    *,
    micro_batches: int | None = None,
    forward_only: bool = False,
) -> PlanRequest:
    """The recipe's wishes in the planner's words."""
    codecs: tuple[Codec, ...] = ("fp32", "fp16", "int8") if recipe.plan.lossy_links else ("fp32",)
    optimizer = OptimizerSpec(name=recipe.train.optimizer, momentum=recipe.train.momentum)
    return PlanRequest(
        model=model,
        cluster=cluster,
        batch_rows=recipe.train.batch_rows,
        schedule="forward" if forward_only else recipe.train.schedule,
        objective=recipe.plan.objective,
        micro_batches=micro_batches or recipe.train.micro_batches,
        optimizer_state_copies=optimizer.state_copies,
        codecs=codecs,
        allow_recompute=recipe.train.recompute != "off",
        require_recompute=recipe.train.recompute == "on",
        allocator=recipe.plan.allocator,
        min_stages=recipe.plan.min_workers,
        max_stages=recipe.plan.max_workers,
        fixed_stages=_fixed(recipe, cluster, len(model.layers)),
    )


def _fixed(recipe: Recipe, cluster: ClusterProfile, units: int) -> tuple[FixedStage, ...] | None:
    """The recipe's own cuts, on the devices in the order they joined."""
    if recipe.plan.cuts is None:
        return None
    edges = (0, *recipe.plan.cuts, units)
    return tuple(
        FixedStage(worker=device.worker, first_unit=first, stop_unit=stop)
        for device, first, stop in zip(cluster.devices, edges, edges[1:], strict=False)
    )
