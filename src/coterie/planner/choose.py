"""From the search to one candidate: which of nearly equal plans a person would rather have.

The search is exact for its formula; two plans within a few percent are equal to anybody who measures them. So a further
device, a deeper pipeline or a lossy codec must each be worth something.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from coterie.planner.plan import Codec
from coterie.planner.problem import Problem, StageChoice, is_continuous
from coterie.planner.reach import MemoryReach
from coterie.planner.request import PlanRequest
from coterie.planner.search import Candidate, TimeSearch, fastest_of
from coterie.planner.tables import DepthMode, Ints, Tables, memory_limits
from coterie.planner.timing import simulated_step_s

FEWER_DEVICES = 0.02
"""A further device must shorten the step by more than this."""

DEEPER = 0.05
"""A deeper pipeline (more memory; more staleness under `stash`) must shorten the step by more than this."""

LOSSY = 0.02
"""A lossy codec, where the user permits it, must shorten the step by more than this."""


RECOMPUTED = 0.05
"""For the least memory: recomputation (a third more time) must save more than this of the fullest device's peak."""


def micro_batch_counts(request: PlanRequest) -> tuple[int, ...]:
    """Counts to choose among: the fixed one, or the divisors of the batch."""
    if request.micro_batches is not None:
        return (request.micro_batches,)
    return tuple(count for count in range(1, request.batch_rows + 1) if request.batch_rows % count == 0)


def choose(request: PlanRequest) -> Candidate | None:
    """The candidate that becomes the plan; None if nothing fits."""
    modes: tuple[DepthMode, ...] = ("textbook", "shallower")
    for mode in modes:
        best = _least_memory(request, mode) if request.objective == "memory" else _least_time(request, mode)
        if best is not None:
            return _mildest_codecs(best)
    return None


def _least_time(request: PlanRequest, mode: DepthMode) -> Candidate | None:
    all_tables = _all_tables(request)
    return _fastest_in_mode(all_tables, mode, memory_limits(all_tables[0].problem))


def _least_memory(request: PlanRequest, mode: DepthMode) -> Candidate | None:
    """Fastest of the plans whose fullest device needs least; recomputation only where it saves `RECOMPUTED`."""
    may_choose = request.allow_recompute and not request.require_recompute
    all_tables = _all_tables(msgspec.structs.replace(request, allow_recompute=False) if may_choose else request)
    peak = _least_peak(all_tables, mode)
    if may_choose:
        with_recompute = _all_tables(request)
        less = _least_peak(with_recompute, mode)
        if less is not None and (peak is None or less < peak * (1 - RECOMPUTED)):
            all_tables, peak = with_recompute, less
    if peak is None:
        return None
    return _fastest_in_mode(all_tables, mode, memory_limits(all_tables[0].problem).clip(max=peak))


def _all_tables(request: PlanRequest) -> list[Tables]:
    return [Tables(Problem(request, count)) for count in micro_batch_counts(request)]


def _least_peak(all_tables: Sequence[Tables], mode: DepthMode) -> int | None:
    limits = memory_limits(all_tables[0].problem)
    peaks = [MemoryReach(tables, mode).least_peak(limits) for tables in all_tables]
    return min((peak for peak in peaks if peak is not None), default=None)


def _fastest_in_mode(all_tables: Sequence[Tables], mode: DepthMode, limits: Ints) -> Candidate | None:
    searches = [TimeSearch(tables, mode, limits) for tables in all_tables]
    best = fastest_of(searches)
    if best is None:
        return None
    if mode == "textbook" and best.problem.request.objective == "time" and _depth_may_matter(best):
        deep_searches = [TimeSearch(tables, "deeper", limits) for tables in all_tables]
        deeper = fastest_of(deep_searches, best.cost.step_s * (1 - DEEPER))
        if deeper is not None:
            best, searches = deeper, deep_searches
    best = _with_fewer_devices(best, searches)
    if mode == "textbook" and best.problem.request.objective == "time":
        return _hide_slow_links(best, limits) or best
    return best


def _depth_may_matter(best: Candidate) -> bool:
    """Could hiding the links save `DEEPER`? More depth saves at most the slowest link's round trip per period."""
    problem = best.problem
    if problem.kind in {"gpipe", "forward"}:
        return False
    there, back = problem.transfers_s(problem.request.codecs[0])
    slowest = float(
        (there + back + problem.round_trip_latencies_s()[:, :, None])[:, :, 1 : problem.units].max(initial=0.0)
    )
    return problem.micro_batches * slowest > DEEPER * best.cost.step_s


def _with_fewer_devices(best: Candidate, searches: Sequence[TimeSearch]) -> Candidate:
    below_s = best.cost.step_s * (1 + FEWER_DEVICES)
    low, high = best.problem.request.min_stages, len(best.stages)
    while low < high:
        middle = (low + high) // 2
        fewer = fastest_of(searches, below_s, middle)
        if fewer is None:
            low = middle + 1
        else:
            best, high = fewer, len(fewer.stages)
    return best


def _mildest_codecs(best: Candidate) -> Candidate:
    """Take back every lossy codec that saves next to nothing, first link first."""
    order: tuple[Codec, ...] = ("fp32", "fp16", "int8")
    problem = best.problem
    stages = list(best.stages)
    below_s = best.cost.step_s * (1 + LOSSY)
    for number, stage in enumerate(stages[:-1]):
        for codec in order[: order.index(stage.codec)]:
            if codec not in problem.request.codecs:
                continue
            milder = [*stages[:number], msgspec.structs.replace(stage, codec=codec), *stages[number + 1 :]]
            if problem.cost(milder).step_s <= below_s:
                stages = milder
                break
    return Candidate(problem, tuple(stages), problem.cost(stages))


def _hide_slow_links(best: Candidate, limits: Ints) -> Candidate | None:
    """Deepen stages where a round trip to a middle stage, which the formula leaves out, makes them wait.

    Between stages s < t the order of actions forms a loop: forwards s to t, one turn at t, backwards t to s. It returns
    `d_s - d_t + 1` micro-batches later, so the period is at least the loop's seconds over that number.
    """
    problem, stages = best.problem, list(best.stages)
    if problem.kind in {"gpipe", "forward"} or len(stages) == 1:
        return None
    own_s = [sum(problem.compute_s(stage)) for stage in stages]
    round_s = [
        sum(problem.transfer_s(stage.device, after.device, stage.stop_unit, stage.codec))
        + problem.round_trip_latency_s(stage.device, after.device)
        for stage, after in pairwise(stages)
    ]
    period_s = max(problem.cost([msgspec.structs.replace(stage, depth=1_000_000) for stage in stages]).period_s, 1e-12)
    load_s = own_s[-1] + period_s * (stages[-1].depth - 1)
    for number in range(len(stages) - 2, -1, -1):
        load_s += own_s[number] + round_s[number]
        depth = max(stages[number].depth, _ceil(load_s / period_s))
        if not is_continuous(problem.kind) or problem.kind == "2bw":
            depth = min(depth, max(problem.micro_batches, stages[number].depth))
        while depth > stages[number].depth and not _fits(problem, stages[number], depth, limits):
            depth -= 1
        stages[number] = msgspec.structs.replace(stages[number], depth=max(depth, stages[number + 1].depth))
        load_s = max(load_s, own_s[number] + period_s * (stages[number].depth - 1))
    deeper = Candidate(problem, tuple(stages), problem.cost(stages))
    if not deeper.cost.fits or simulated_step_s(deeper) > simulated_step_s(best) * (1 - DEEPER):
        return None
    return deeper


def _ceil(value: float) -> int:
    return int(-(-(value - 1e-9) // 1))


def _fits(problem: Problem, stage: StageChoice, depth: int, limits: Ints) -> bool:
    memory = problem.memory(msgspec.structs.replace(stage, depth=depth))
    return memory.above_base <= int(limits[stage.device])
