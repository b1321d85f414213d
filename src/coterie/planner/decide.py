"""`make_plan`: from a request to a plan with its reasons."""

import msgspec

from coterie.planner.choose import choose
from coterie.planner.memory import MemorySettings, estimate_memory
from coterie.planner.narrow import narrow
from coterie.planner.notes import left_out, notes
from coterie.planner.plan import Plan, StageAssignment
from coterie.planner.problem import Problem, StageChoice, unit_seconds
from coterie.planner.request import PlanRequest, validate
from coterie.planner.search import Candidate
from coterie.planner.settle import settle
from coterie.planner.shortfall import does_not_fit
from coterie.planner.timing import simulated_step_s, stage_times
from coterie.profiles.cluster_profile import DeviceProfile


def make_plan(request: PlanRequest) -> Plan:
    """Decide who runs what.

    Searches all cuts, device orders and subsets, micro-batch counts (unless fixed), depths, recomputation, allocators
    and codecs exactly, for the seconds of a step (formula: see `problem`) or for the fullest device's memory (ties:
    less time). Of plans within 2 % the one with fewer devices is taken, or where one stands the one that moves least.
    `predicted_step_s` is the schedule simulated with the stages' seconds.

    Raises:
        RecipeError: The request makes no sense.
        DoesNotFitError: No plan fits the devices' memory.
    """
    validate(request)
    narrowed, not_looked_at = narrow(request)
    candidate = choose(narrowed)
    if candidate is None:
        raise does_not_fit(narrowed)
    candidate = settle(narrowed, candidate)
    fastest, alone_s = _fastest_alone(request)
    alone_peak = _peak_alone(request, fastest)
    return Plan(
        version=request.version,
        schedule=request.schedule,
        objective=request.objective,
        batch_rows=request.batch_rows,
        micro_batches=candidate.problem.micro_batches,
        units=candidate.problem.units,
        stages=_assignments(candidate),
        left_out=left_out(candidate) + not_looked_at,
        predicted_step_s=simulated_step_s(candidate),
        one_device_step_s=alone_s,
        one_device_peak=alone_peak,
        notes=notes(candidate, fastest, alone_s, alone_peak),
        keeps_data_local=bool(request.owner_workers),
    )


def _assignments(candidate: Candidate) -> tuple[StageAssignment, ...]:
    problem = candidate.problem
    assignments = []
    for number, (stage, times) in enumerate(zip(candidate.stages, stage_times(candidate), strict=True)):
        device = problem.devices[stage.device]
        assignments.append(
            StageAssignment(
                stage=number,
                worker=device.worker,
                device_name=device.name,
                first_unit=stage.first_unit,
                stop_unit=stage.stop_unit,
                in_flight=problem.in_flight(stage.depth),
                recompute=stage.recompute,
                allocator=stage.allocator,
                send_codec=stage.codec,
                memory=problem.memory(stage),
                memory_limit=device.memory_bytes,
                forward_s=times.forward_s,
                backward_s=times.backward_s,
                update_s=times.update_s,
                send_s=times.send_s,
            )
        )
    return tuple(assignments)


def repredicted(plan: Plan, request: PlanRequest) -> Plan:
    """The same plan with the figures that it has on the request's cluster; nothing is decided anew.

    Every worker of the plan must be in the cluster.
    """
    candidate = as_candidate(plan, request)
    return msgspec.structs.replace(plan, stages=_assignments(candidate), predicted_step_s=simulated_step_s(candidate))


def as_candidate(plan: Plan, request: PlanRequest) -> Candidate:
    """A plan's decisions, with what the formula says about them on the request's cluster."""
    problem = Problem(request, plan.micro_batches)
    places = {device.worker: number for number, device in enumerate(problem.devices)}
    stages = tuple(
        StageChoice(
            device=places[stage.worker],
            first_unit=stage.first_unit,
            stop_unit=stage.stop_unit,
            depth=stage.in_flight,
            recompute=stage.recompute,
            allocator=stage.allocator,
            codec=stage.send_codec,
        )
        for stage in plan.stages
    )
    return Candidate(problem, stages, problem.cost(stages))


def _fastest_alone(request: PlanRequest) -> tuple[DeviceProfile, float]:
    """The device that takes least for a whole batch at once, memory left aside."""

    def step_s(device: DeviceProfile) -> float:
        layers = request.model.layers
        seconds = [unit_seconds(device, layer, request.batch_rows) for layer in layers]
        forward = sum(unit[0] for unit in seconds)
        if request.schedule == "forward":
            return forward
        update = sum(layer.trainable_bytes for layer in layers) / device.update_bytes_per_s
        return forward + sum(unit[1] for unit in seconds) + update

    fastest = min(request.cluster.devices, key=step_s)
    return fastest, step_s(fastest)


def _peak_alone(request: PlanRequest, device: DeviceProfile) -> int:
    settings = MemorySettings(
        schedule="forward" if request.schedule == "forward" else "flush",
        optimizer_state_copies=request.optimizer_state_copies,
        allocator="tight" if request.allocator == "tight" else "default",
        device_type=device.device_type,
        accumulates=False,
        kept_rows=request.batch_rows if request.keeps_micro_batch else request.kept_rows,
        shared=device.shared_memory_at(request.batch_rows),
    )
    estimate = estimate_memory(
        request.model,
        (0, len(request.model.layers)),
        rows=request.batch_rows,
        in_flight=1,
        settings=settings,
        base_bytes=device.base_bytes,
    )
    return estimate.total
