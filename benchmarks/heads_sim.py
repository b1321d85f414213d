"""The allocation of heads on synthetic profiles: the exact solver against the paper's binary search, and its time.

Figures: search_none_share (share of cases in which the search finds no allocation), search_slower_share (in which its
allocation is predicted more than 5 % slower than the exact one, those without one not counted),
search_none_or_slower_share (their sum), search_worst_over_exact, exact_over_best_single_max (never above 1),
exact_ms_128_heads_4_backends (the median of processor time), neurons_ms_14336_4_backends.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from coterie.planner.head_allocation import PartAllocation, allocate_part
from coterie.planner.paper_search import allocate_by_binary_search
from coterie.profiles.backend_profile import ShareTiming
from reporting import Report, parse_arguments

NAMES = ("torch", "opencl", "mnn", "webgpu")
HEADS = (2, 4, 8, 12, 16, 32)
NOTABLY = 1.05

Profiles = dict[str, tuple[ShareTiming, ...]]


def smooth(draw: random.Random, heads: int) -> list[float]:
    """A fixed cost and an equal one for each head, up to eight times as high on one backend as on another."""
    per_head = 1e-3 * 2 ** draw.uniform(0, 3)
    fixed = per_head * draw.uniform(0, 2)
    return [fixed + per_head * count for count in range(1, heads + 1)]


def noisy(draw: random.Random, heads: int) -> list[float]:
    """The same with 5 % of noise, as measured: more heads are sometimes faster."""
    return [seconds * draw.uniform(0.95, 1.05) for seconds in smooth(draw, heads)]


def stepped(draw: random.Random, heads: int) -> list[float]:
    """Heads that run in waves, as on a GPU: time rises only at every second or fourth head."""
    wave = draw.choice((2, 4))
    seconds = smooth(draw, heads)
    return [seconds[min(-(-count // wave) * wave, heads) - 1] for count in range(1, heads + 1)]


SHAPES: dict[str, Callable[[random.Random, int], list[float]]] = {"smooth": smooth, "noisy": noisy, "stepped": stepped}


def profiles(draw: random.Random, shape: str, heads: int, backends: int) -> Profiles:
    """Synthetic profiles of some backends."""
    return {
        name: tuple(
            ShareTiming(count=count, seconds=seconds, fused_s=seconds)
            for count, seconds in enumerate(SHAPES[shape](draw, heads), start=1)
        )
        for name in NAMES[:backends]
    }


class Found(NamedTuple):
    """Both allocations of one case."""

    exact: PartAllocation
    searched: PartAllocation | None

    @property
    def ratio(self) -> float:
        """The searched allocation's seconds over the exact one's."""
        assert self.searched is not None
        return self.searched.predicted_s / self.exact.predicted_s


def compare(shape: str, backends: int, cases: int) -> list[Found]:
    """Both ways on many profiles of one shape. No threshold: what is compared is the search, not the bypass."""
    draw = random.Random(f"{shape} {backends}")
    found = []
    for _ in range(cases):
        heads = draw.choice(HEADS)
        case = profiles(draw, shape, heads, backends)
        exact = allocate_part(case, heads, least_gain=0.0)
        found.append(Found(exact, allocate_by_binary_search(case, heads)))
    return found


def row(title: str, found: list[Found]) -> tuple[str, float, float, float, float]:
    """Shares of cases without an answer and with a notably slower one; the worst ratio; what the exact one gains."""
    ratios = [case.ratio for case in found if case.searched is not None]
    return (
        title,
        sum(case.searched is None for case in found) / len(found),
        sum(ratio > NOTABLY for ratio in ratios) / len(found),
        max(ratios, default=float("nan")),
        statistics.median(case.exact.best_single_s / case.exact.predicted_s for case in found),
    )


def solver_ms(rounds: int, shape: str, heads: int, step: int | None = None) -> float:
    """Median milliseconds of processor time of one allocation over four backends, all that do not pay left out."""
    draw = random.Random(f"{shape} {heads}")
    samples = []
    for _ in range(rounds):
        case = profiles(draw, shape, 128, len(NAMES)) if step is None else widths(draw, heads)
        start_s = time.process_time()
        allocate_part(case, heads, step=step)
        samples.append((time.process_time() - start_s) * 1e3)
    return statistics.median(samples)


def widths(draw: random.Random, neurons: int) -> Profiles:
    """Profiles of eight feed-forward widths."""
    grid = [neurons * eighth // 8 for eighth in range(1, 9)]
    return {
        name: tuple(
            ShareTiming(count=width, seconds=seconds, fused_s=seconds)
            for width, seconds in zip(grid, noisy(draw, len(grid)), strict=True)
        )
        for name in NAMES
    }


def main() -> int:
    arguments = parse_arguments("Exact allocation of heads against the paper's binary search, on synthetic profiles.")
    cases, rounds = (100, 10) if arguments.quick else (2000, 100)
    report = Report(
        "heads_sim",
        f"{cases} random profiles a row, {HEADS[0]} to {HEADS[-1]} heads, speeds up to 8 times apart; the exact solver "
        "against the paper's binary search in our reading, which bypasses what is 50 % away from the mean",
        arguments,
    )
    everything: list[Found] = []
    rows = []
    for shape in SHAPES:
        for backends in (2, 3, 4):
            found = compare(shape, backends, cases)
            rows.append(row(f"{shape}, {backends} backends", found))
            everything += found
    columns = ("profiles", "search finds none", "> 5 % slower", "worst ratio", "exact over best single")
    report.table("the paper's search, and what the exact allocation gains (medians)", columns, rows)
    _, none, slower, worst, _ = row("all", everything)
    report.figure("search_none_share", none)
    report.figure("search_slower_share", slower)
    report.figure("search_none_or_slower_share", none + slower)
    report.figure("search_worst_over_exact", worst)
    over_single = max(case.exact.predicted_s / case.exact.best_single_s for case in everything)
    report.figure("exact_over_best_single_max", over_single, at_most=1.0)
    report.figure("exact_ms_128_heads_4_backends", solver_ms(rounds, "noisy", 128), at_most=5, unit="ms")
    report.figure("neurons_ms_14336_4_backends", solver_ms(rounds, "noisy", 14336, step=16), unit="ms")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
