"""What a plan is asked for: the model, the devices, and what the user permits."""

from typing import Literal

import msgspec

from coterie.errors import RecipeError
from coterie.ids import WorkerId
from coterie.planner.plan import Codec, Objective, Plan
from coterie.profiles.cluster_profile import ClusterProfile
from coterie.profiles.model_profile import ModelProfile
from coterie.schedules.actions import ScheduleKind

AllocatorChoice = Literal["auto", "default", "tight"]


class FixedStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage that the request prescribes: units [first_unit, stop_unit) on `worker`."""

    worker: WorkerId
    first_unit: int
    stop_unit: int


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a plan depends on; equal requests give equal plans.

    Attributes:
        model: The model at the run's shapes.
        cluster: Devices and links; a link without a probe counts as a slow one and is noted.
        batch_rows: Rows of one optimizer step.
        micro_batches: Micro-batches of a step; None lets the planner choose among the divisors of `batch_rows`.
        optimizer_state_copies: Copies of each trained parameter that the optimizer keeps (2 for AdamW).
        codecs: How links may carry activations and gradients; only `fp32` is exact.
        allow_recompute: Blocks may run their forward again in backward to save memory.
        require_recompute: They do so on every stage.
        allocator: `auto` lets the planner choose per stage.
        min_stages, max_stages: Bounds on the number of devices used.
        fixed_stages: Cuts and devices that the user prescribes (for comparisons such as the equal split); the planner
            then chooses only what is left: depth, recomputation, allocator, codecs.
        keep: Stages of a plan that stands: of plans that are equal to anybody who measures them the one is taken that
            moves least.
        in_order: Workers whose stages, if they get any, must follow each other in this order.
        owner_workers: Workers of whoever owns the data: first and last stage are on one of these each, so that no
            others are sent token ids and labels. Empty: on any.
        kept_rows: Rows of a generation that are under way at once (0 in every other run).
        keeps_micro_batch: Stages keep `kept_bytes_per_row` of the rows of one micro-batch: activations to be sent.
        version: Of the plan to be made; a re-plan counts up.
    """

    model: ModelProfile
    cluster: ClusterProfile
    batch_rows: int
    schedule: ScheduleKind = "flush"
    objective: Objective = "time"
    micro_batches: int | None = None
    optimizer_state_copies: int = 2
    codecs: tuple[Codec, ...] = ("fp32",)
    allow_recompute: bool = True
    require_recompute: bool = False
    allocator: AllocatorChoice = "auto"
    min_stages: int = 1
    max_stages: int | None = None
    fixed_stages: tuple[FixedStage, ...] | None = None
    keep: tuple[FixedStage, ...] = ()
    in_order: tuple[WorkerId, ...] = ()
    owner_workers: tuple[WorkerId, ...] = ()
    kept_rows: int = 0
    keeps_micro_batch: bool = False
    version: int = 1


def stages_of(plan: Plan) -> tuple[FixedStage, ...]:
    """A plan's stages as a request prescribes or keeps them."""
    return tuple(
        FixedStage(worker=stage.worker, first_unit=stage.first_unit, stop_unit=stage.stop_unit) for stage in plan.stages
    )


def validate(request: PlanRequest) -> None:
    """Refuse requests that make no sense, all mistakes at once.

    Raises:
        RecipeError: With every mistake found.
    """
    units = len(request.model.layers)
    workers = [device.worker for device in request.cluster.devices]
    highest = len(workers) if request.max_stages is None else request.max_stages
    checks = {
        f"batch_rows is {request.batch_rows}, not at least 1": request.batch_rows < 1,
        f"micro_batches is {request.micro_batches}, not at least 1": (
            request.micro_batches is not None and request.micro_batches < 1
        ),
        "there are no devices": not workers,
        "two devices have the same worker id": len(set(workers)) < len(workers),
        "the model has no layers": units < 1,
        "no codec is allowed": not request.codecs,
        "recomputation is both required and forbidden": request.require_recompute and not request.allow_recompute,
        f"min_stages is {request.min_stages} and max_stages {highest}": not 1 <= request.min_stages <= highest,
        f"{request.min_stages} stages need as many devices and units; there are {len(workers)} and {units}": (
            request.min_stages > min(len(workers), units)
        ),
        f"the stages to keep do not cover units 0 to {units} once, in order": (
            bool(request.keep) and not _cover(request.keep, units)
        ),
        "none of the devices that own the data is there": (
            bool(request.owner_workers) and not set(request.owner_workers) & set(workers)
        ),
    }
    wrong = [mistake for mistake, made in checks.items() if made]
    if request.fixed_stages is not None:
        wrong += _mistakes_of_fixed_stages(request.fixed_stages, workers, units)
        ends = {stage.worker for stage in (*request.fixed_stages[:1], *request.fixed_stages[-1:])}
        if request.owner_workers and not ends <= set(request.owner_workers):
            wrong.append("first and last of the fixed stages are not both on devices that own the data")
    if wrong:
        raise RecipeError("this plan cannot be made: " + "; ".join(wrong), hint="mend these settings")


def _mistakes_of_fixed_stages(stages: tuple[FixedStage, ...], workers: list[WorkerId], units: int) -> list[str]:
    wrong = [f"stage on unknown worker {stage.worker}" for stage in stages if stage.worker not in workers]
    if len({stage.worker for stage in stages}) < len(stages):
        wrong.append("a device has two of the fixed stages")
    if not _cover(stages, units):
        wrong.append(f"the fixed stages do not cover units 0 to {units} once, in order")
    return wrong


def _cover(stages: tuple[FixedStage, ...], units: int) -> bool:
    edges = [0] + [stage.stop_unit for stage in stages]
    starts = [stage.first_unit for stage in stages] + [units]
    return edges == starts and all(stage.first_unit < stage.stop_unit for stage in stages)
