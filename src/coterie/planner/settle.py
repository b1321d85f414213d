"""Where a plan stands already: of new ones that are equal to anybody who measures them, the one that moves least.

An exact search for that would have the bytes moved in its objective. Three candidates are looked at instead: the
fastest plan, the fastest that leaves the devices in their order, and the cut that stands; and of each the edges
between stages are shifted back towards where they are, as long as that costs next to nothing.
"""

from collections.abc import Iterator

import msgspec

from coterie.planner.choose import choose
from coterie.planner.problem import StageChoice
from coterie.planner.request import FixedStage, PlanRequest
from coterie.planner.search import Candidate

EQUAL = 0.02
"""A plan that moves more must be faster by more than this."""


def settle(request: PlanRequest, fastest: Candidate) -> Candidate:
    """The plan to take instead of the fastest, which may be itself."""
    if not request.keep or request.fixed_stages is not None or request.objective == "memory":
        return fastest
    limit_s = fastest.cost.step_s * (1 + EQUAL)
    found = [_shifted_back(candidate, limit_s) for candidate in (fastest, *_others(request, limit_s))]
    return min(found, key=lambda candidate: (moved_bytes(candidate), candidate.cost.step_s))


def moved_bytes(candidate: Candidate) -> int:
    """Bytes of the units that get another owner than in the plan that stands."""
    return sum(moved for moved in _moved_by_unit(candidate.problem.request, _workers(candidate)))


def _workers(candidate: Candidate) -> list[str]:
    """The owner of each unit."""
    devices = candidate.problem.devices
    return [
        devices[stage.device].worker for stage in candidate.stages for _ in range(stage.first_unit, stage.stop_unit)
    ]


def _moved_by_unit(request: PlanRequest, workers: list[str]) -> Iterator[int]:
    owners = [stage.worker for stage in request.keep for _ in range(stage.first_unit, stage.stop_unit)]
    for before, after, layer in zip(owners, workers, request.model.layers, strict=True):
        if before != after:
            yield layer.parameter_bytes + layer.trainable_bytes * request.optimizer_state_copies


def _others(request: PlanRequest, limit_s: float) -> Iterator[Candidate]:
    here = {device.worker for device in request.cluster.devices}
    order = tuple(stage.worker for stage in request.keep)
    requests = [msgspec.structs.replace(request, in_order=order)]
    if here.issuperset(order) and _is_permitted(request, request.keep):
        requests.append(msgspec.structs.replace(request, fixed_stages=request.keep))
    for other in requests:
        candidate = choose(other)
        if candidate is not None and candidate.cost.step_s <= limit_s:
            yield candidate


def _is_permitted(request: PlanRequest, stages: tuple[FixedStage, ...]) -> bool:
    """Does the plan that stands keep to what is asked for now?"""
    most = len(stages) if request.max_stages is None else request.max_stages
    ends = {stages[0].worker, stages[-1].worker}
    return request.min_stages <= len(stages) <= most and (not request.owner_workers or ends <= {*request.owner_workers})


def _shifted_back(candidate: Candidate, limit_s: float) -> Candidate:
    """Shift edges between stages by one unit at a time, whichever saves most, until none may be shifted any more."""
    while True:
        better = [
            shifted
            for shifted in _neighbours(candidate)
            if shifted.cost.fits and shifted.cost.step_s <= limit_s and moved_bytes(shifted) < moved_bytes(candidate)
        ]
        if not better:
            return candidate
        candidate = min(better, key=lambda shifted: (moved_bytes(shifted), shifted.cost.step_s))


def _neighbours(candidate: Candidate) -> Iterator[Candidate]:
    for edge in range(len(candidate.stages) - 1):
        for shift in (-1, 1):
            stages = list(candidate.stages)
            before, after = stages[edge], stages[edge + 1]
            place = before.stop_unit + shift
            if before.first_unit < place < after.stop_unit:
                stages[edge] = _between(before, before.first_unit, place)
                stages[edge + 1] = _between(after, place, after.stop_unit)
                yield Candidate(candidate.problem, tuple(stages), candidate.problem.cost(stages))


def _between(stage: StageChoice, first_unit: int, stop_unit: int) -> StageChoice:
    return msgspec.structs.replace(stage, first_unit=first_unit, stop_unit=stop_unit)
