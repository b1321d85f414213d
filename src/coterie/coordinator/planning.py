"""From a recipe and its cluster to the planner's question, and back to a plan with its explanation. No torch."""

from typing import TYPE_CHECKING

import msgspec

from coterie.config.recipe import Recipe
from coterie.errors import RecipeError, UnsupportedModelError
from coterie.ids import WorkerId
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.planner import FixedStage, PlanRequest, explain, make_plan
from coterie.planner.plan import Codec, Plan
from coterie.planner.request import stages_of
from coterie.profiles.cluster_profile import ClusterProfile
from coterie.profiles.model_profile import ModelProfile

if TYPE_CHECKING:
    from coterie.coordinator.job import Job


def make_job_plan(
    job: "Job",
    cluster: ClusterProfile,
    *,
    micro_batches: int | None = None,
    owner_workers: tuple[WorkerId, ...] = (),
) -> tuple[Plan, str]:
    """Plan a job on these devices. `micro_batches` is set when a run is resumed: it is part of its numbers.

    Raises:
        DoesNotFitError: No plan fits.
        RecipeError: The data are to stay with their owner, and none of its workers is there.
        UnsupportedModelError: They are, and every block of the model reads token ids.
    """
    if job.recipe.plan.keep_data_local and job.anatomy.blocks_read_ids:
        raise UnsupportedModelError(
            f"the blocks of {job.source.name} read token ids, which keep_data_local keeps from all devices but yours",
            hint="leave plan.keep_data_local out, or take another model",
        )
    request = plan_request(
        job.recipe,
        job.model_profile,
        cluster,
        micro_batches=micro_batches,
        forward_only=job.forward_only,
        owner_workers=owner_workers,
    )
    if job.prompts is not None:
        request = msgspec.structs.replace(request, kept_rows=request.batch_rows)
    plan = make_plan(request)
    return plan, explain(plan, request)


def next_request(
    job: "Job", cluster: ClusterProfile, current: Plan, *, owner_workers: tuple[WorkerId, ...] = ()
) -> PlanRequest:
    """The question again, in mid-run: of other devices or speeds, for the plan after `current`.

    The micro-batches of a step stay what they are. With fewer devices than the recipe wants at least, or than it has
    cuts for, training goes on with those that are left.
    """
    units = len(job.model_profile.layers)
    request = plan_request(
        job.recipe, job.model_profile, cluster, micro_batches=current.micro_batches, owner_workers=owner_workers
    )
    present = {device.worker for device in cluster.devices}
    fixed = request.fixed_stages
    if fixed is not None and (len(fixed) <= len(job.recipe.plan.cuts or ()) or fixed[-1].stop_unit != units):
        fixed = None
    return msgspec.structs.replace(
        request,
        version=current.version + 1,
        min_stages=max(min(request.min_stages, len(present)), 1),
        fixed_stages=fixed,
        keep=stages_of(current),
    )


def plan_request(
    recipe: Recipe,
    model: ModelProfile,
    cluster: ClusterProfile,
    *,
    micro_batches: int | None = None,
    forward_only: bool = False,
    owner_workers: tuple[WorkerId, ...] = (),
) -> PlanRequest:
    """The recipe's wishes in the planner's words; `owner_workers` are those on the data owner's own machine.

    Raises:
        RecipeError: The data are to stay there, and none of these workers is there.
    """
    owners = owner_workers if recipe.plan.keep_data_local else ()
    if recipe.plan.keep_data_local and not owners:
        raise RecipeError(
            "keep_data_local puts the first and the last layer on local workers, and none of them is there",
            hint="give two of them, as `--local-worker name=first --local-worker name=last`",
        )
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
        fixed_stages=_fixed(recipe, cluster, len(model.layers), owners),
        owner_workers=owners,
    )


def _fixed(
    recipe: Recipe, cluster: ClusterProfile, units: int, owners: tuple[WorkerId, ...]
) -> tuple[FixedStage, ...] | None:
    """The recipe's own cuts, on the devices in the order they joined; both ends on the owner's where that is asked."""
    if recipe.plan.cuts is None:
        return None
    edges = (0, *recipe.plan.cuts, units)
    workers = [device.worker for device in cluster.devices]
    if len(owners) > 1:
        inner = [worker for worker in workers if worker not in owners] + list(owners[1:-1])
        workers = [owners[0], *inner[: len(edges) - 3], owners[-1]]
    return tuple(
        FixedStage(worker=worker, first_unit=first, stop_unit=stop)
        for worker, first, stop in zip(workers, edges, edges[1:], strict=False)
    )
