"""`compare_ways`: local LoRA, pipeline LoRA, side-tuning and both together, for given devices, links and data.

Every figure is a prediction from profiles. Weights are sent once, before the run, from the data's owner; what is
trained comes back once, at its end. Checkpoints in between and evaluations are not counted, in none of the ways.
"""

from collections.abc import Sequence
from itertools import pairwise

from coterie.errors import DoesNotFitError, RecipeError
from coterie.ids import WorkerId
from coterie.planner.decide import make_plan
from coterie.planner.exposure import exposed_by_stages, exposed_to_nobody
from coterie.planner.plan import Plan
from coterie.planner.problem import CODEC_SIZE, Problem
from coterie.planner.request import PlanRequest
from coterie.planner.side_way import side_way
from coterie.planner.way import Span, Way, WayName, WaysRequest
from coterie.planner.way_ledger import INPUT_BYTES, LABEL_BYTES, Ledger, among
from coterie.profiles.model_profile import ModelProfile
from coterie.units import name_units


def compare_ways(request: WaysRequest) -> tuple[Way, ...]:
    """All four ways, those that do not fit with the reason.

    Raises:
        RecipeError: Owner or server are no devices of the request, or the request itself makes no sense.
    """
    workers = [device.worker for device in request.adapters.cluster.devices]
    for what, worker in (("owner", request.owner), ("server", request.server)):
        if worker not in workers:
            raise RecipeError(f"the {what} {worker!r} is no device", hint=f"the devices are {', '.join(workers)}")
    others = [worker for worker in workers if worker != request.server]
    return (
        _adapter_way(request, "local LoRA", [request.owner]),
        _adapter_way(request, "pipeline LoRA", workers),
        side_way(request, "side-tuning", [request.owner]),
        side_way(request, "pipeline + side-tuning", others),
    )


def _adapter_way(request: WaysRequest, name: WayName, workers: Sequence[WorkerId]) -> Way:
    is_pipeline = name == "pipeline LoRA"
    if is_pipeline and len(workers) < 2:
        return Way(name=name, reason="a pipeline needs two devices; there is one")
    asked = among(request.adapters, workers, least=2 if is_pipeline else 1)
    try:
        plan = make_plan(asked)
    except DoesNotFitError as error:
        return Way(name=name, reason=error.message)
    ledger = Ledger(request)
    exposes = exposed_to_nobody(ledger.device(request.owner).name)
    if is_pipeline:
        exposes = exposed_by_stages(plan.stages, request.owner, sees_labels=True)
    setup_s = _hand_out(ledger, request, asked.model, plan)
    _count_training(ledger, request, asked, plan)
    return Way(
        name=name,
        spans=(
            *([Span(name="send weights", seconds=setup_s)] if setup_s else []),
            Span(name="train", seconds=plan.predicted_step_s * request.data.steps),
        ),
        devices=ledger.costs(),
        exposes=exposes,
        device_passes=request.data.passes,
        plan=plan,
    )


def _hand_out(ledger: Ledger, request: WaysRequest, model: ModelProfile, plan: Plan) -> float:
    """Weights go to their stages before the run, and what was trained comes back after it; seconds of the first."""
    seconds = 0.0
    for stage in plan.stages:
        passes = "forward only" if stage.stop_unit <= model.first_backward_unit else "forward and backward"
        units = name_units(stage.first_unit, stage.stop_unit, plan.units)
        ledger.take_part(stage.worker, f"{units}, {passes}", stage.memory.total)
        seconds += ledger.send(request.owner, stage.worker, stage.memory.weights)
        trained = sum(layer.trainable_bytes for layer in model.layers[stage.first_unit : stage.stop_unit])
        ledger.send(stage.worker, request.owner, trained)
    if request.owner not in {stage.worker for stage in plan.stages}:
        ledger.take_part(request.owner, "holds the data")
    return seconds


def _count_training(ledger: Ledger, request: WaysRequest, asked: PlanRequest, plan: Plan) -> None:
    problem = Problem(asked, plan.micro_batches)
    data = request.data
    micro_batches = data.steps * plan.micro_batches
    tokens = data.epoch.padded * data.passes
    for stage in plan.stages:
        own_s = plan.micro_batches * (stage.forward_s + stage.backward_s)
        ledger.compute(stage.worker, data.steps * (own_s + problem.updates_per_step * stage.update_s))
        ledger.send(request.owner, stage.worker, INPUT_BYTES * tokens)
    ledger.send(request.owner, plan.stages[-1].worker, LABEL_BYTES * data.epoch.selected * data.passes)
    for stage, after in pairwise(plan.stages):
        size = micro_batches * float(problem.sent_bytes[stage.stop_unit - 1]) * CODEC_SIZE[stage.send_codec]
        ledger.send(stage.worker, after.worker, size)
        if stage.stop_unit > problem.first_backward_unit:
            ledger.send(after.worker, stage.worker, size)
    exchanged = problem.exchange_s(0, len(problem.devices) - 1) if len(plan.stages) > 1 else 0.0
    if exchanged:
        size = float(asked.model.tied_bytes * data.steps)
        ledger.send(plan.stages[0].worker, plan.stages[-1].worker, size)
        ledger.send(plan.stages[-1].worker, plan.stages[0].worker, size)
