"""The sentences that come with a plan: why it is so, and why a device is left out."""

from collections.abc import Iterator

from coterie.planner.choose import FEWER_DEVICES
from coterie.planner.memory import tied_is_trained
from coterie.planner.plan import LeftOut
from coterie.planner.problem import UNMEASURED_BYTES_PER_S, Problem
from coterie.planner.search import Candidate
from coterie.planner.tables import Tables, memory_limits
from coterie.planner.timing import simulated_step_s
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.units import counted, format_bytes, format_rate, format_seconds


def left_out(candidate: Candidate) -> tuple[LeftOut, ...]:
    """Every device that the plan does not use, with the reason."""
    problem = candidate.problem
    used = {stage.device for stage in candidate.stages}
    least = Tables(problem).least_bytes(1, "shallower") if len(used) < len(problem.devices) else None
    result = []
    for number, device in enumerate(problem.devices):
        if number in used:
            continue
        assert least is not None, "computed whenever a device is left out"
        needed = int(least[number].min())
        room = int(memory_limits(problem)[number])
        result.append(
            LeftOut(
                worker=device.worker, device_name=device.name, reason=_why_left_out(candidate, device, needed, room)
            )
        )
    return tuple(result)


def _why_left_out(candidate: Candidate, device: DeviceProfile, needed: int, room: int) -> str:
    request = candidate.problem.request
    if needed > room:
        return (
            f"cannot hold even one unit: of its {format_bytes(device.memory_bytes)} the worker takes "
            f"{format_bytes(device.base_bytes)} and the smallest stage {format_bytes(needed)}, "
            f"{format_bytes(needed - room)} short"
        )
    if request.max_stages is not None and len(candidate.stages) == request.max_stages:
        return (
            f"no more than {counted(request.max_stages, 'stage')} {'is' if request.max_stages == 1 else 'are'} allowed"
        )
    if request.schedule == "2bw" and len(candidate.stages) == candidate.problem.micro_batches:
        return "2bw uses no more stages than there are micro-batches"
    if request.objective == "memory":
        return "the fullest device would not need less memory with it"
    return f"a plan with it would not be more than {FEWER_DEVICES:.0%} faster"


def notes(candidate: Candidate, fastest: DeviceProfile, alone_s: float, alone_peak: int) -> tuple[str, ...]:
    """What a person should know about the plan besides its table.

    Args:
        candidate: What became the plan.
        fastest: The device that would be fastest alone, with the whole batch at once.
        alone_s: Its seconds per step.
        alone_peak: The memory it would need.
    """
    return (
        *_about_one_device(candidate, fastest, alone_s, alone_peak),
        *_about_memory(candidate),
        *_about_links(candidate),
        *_about_schedule(candidate),
    )


def _about_one_device(candidate: Candidate, fastest: DeviceProfile, alone_s: float, alone_peak: int) -> Iterator[str]:
    problem = candidate.problem
    step_s = simulated_step_s(candidate)
    if len(candidate.stages) == 1:
        name = problem.devices[candidate.stages[0].device].name
        yield f"one device alone is enough: {name} takes {format_seconds(step_s)} a step"
        if len(problem.devices) > 1 and problem.request.objective == "time" and problem.request.fixed_stages is None:
            yield f"no split over more devices would be more than {FEWER_DEVICES:.0%} faster"
        return
    lacking = "" if alone_peak <= fastest.memory_bytes else ", which lacks the memory for it"
    faster = alone_s / step_s if step_s > 0 else 1.0
    if faster >= 1:
        yield f"{faster:.2f} times as fast as {fastest.name} alone{lacking}"
    else:
        yield f"{fastest.name} alone{lacking}: {1 / faster:.2f} times as fast, {format_seconds(alone_s)} a step"


def _about_memory(candidate: Candidate) -> Iterator[str]:
    devices = candidate.problem.devices
    recomputing = [devices[stage.device].name for stage in candidate.stages if stage.recompute]
    if recomputing and not candidate.problem.request.require_recompute:
        yield f"memory is short: {_they(recomputing, 'run')} each block's forward again in backward"
    tight = [devices[stage.device].name for stage in candidate.stages if stage.allocator == "tight"]
    if tight and candidate.problem.request.allocator == "auto":
        why = "frozen weights are unpacked for each use" if candidate.problem.model.unpacks else "memory is short"
        yield f"{why}: {_they(tight, 'use')} the tight allocator, which costs a few percent of time"
    stages = len(candidate.stages)
    shallower = [
        devices[stage.device].name
        for number, stage in enumerate(candidate.stages)
        if candidate.problem.kind in {"flush", "stash", "2bw"}
        and stage.depth < candidate.problem.in_flight(stages - number)
    ]
    if shallower:
        yield f"memory is short: {_they(shallower, 'hold')} fewer micro-batches than a full pipeline needs"


def _about_links(candidate: Candidate) -> Iterator[str]:
    problem = candidate.problem
    stages = len(candidate.stages)
    deeper = [
        problem.devices[stage.device].name
        for number, stage in enumerate(candidate.stages)
        if problem.kind in {"flush", "stash", "2bw"}
        and problem.in_flight(stage.depth) > stages - number
        and stage.stop_unit > problem.first_backward_unit
    ]
    if deeper:
        yield f"{_they(deeper, 'hold')} more micro-batches than usual to hide a slow link"
    for stage, after in zip(candidate.stages, candidate.stages[1:], strict=False):
        pair = (min(stage.device, after.device), max(stage.device, after.device))
        names = f"{problem.devices[stage.device].name} to {problem.devices[after.device].name}"
        if pair in problem.unmeasured:
            yield f"the link {names} was not measured; {format_rate(UNMEASURED_BYTES_PER_S)} is assumed"
        if stage.codec != "fp32":
            yield f"the link {names} carries {stage.codec}, which is not exact"


def _about_schedule(candidate: Candidate) -> Iterator[str]:
    problem = candidate.problem
    split = len(candidate.stages) > 1
    forward_only = [
        problem.devices[stage.device].name
        for stage in candidate.stages
        if stage.stop_unit <= problem.first_backward_unit
    ]
    if forward_only and problem.kind != "forward":
        yield f"{_they(forward_only, 'run')} forward only: nothing is trained there or before"
    if problem.kind == "stash":
        if _was_held_to_one(problem):
            yield "stash cannot split a model whose tied matrix is trained; freeze it or use the flush schedule"
        stale = max(stage.depth for stage in candidate.stages) - 1
        if split:
            yield f"stash: the first stage's gradients are {counted(stale, 'update')} old; clipping is per stage"
    if problem.kind == "2bw":
        yield "2bw: every gradient is one update old"
    if problem.request.owner_workers:
        ends = [
            problem.devices[stage.device].name for stage in dict.fromkeys((candidate.stages[0], candidate.stages[-1]))
        ]
        yield f"token ids and labels stay on {' and '.join(ends)}"
    if split and tied_is_trained(problem.model) and problem.kind != "forward":
        yield "first and last stage both hold the tied matrix and exchange its gradient each step"


def _was_held_to_one(problem: Problem) -> bool:
    return tied_is_trained(problem.model) and len(problem.devices) > 1


def _they(names: list[str], verb: str) -> str:
    """Devices as the subject of a sentence: `board uses`, `board, phone use`."""
    return f"{', '.join(names)} {verb}{'s' if len(names) == 1 else ''}"
