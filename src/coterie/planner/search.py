"""Exact search for the plan that the formula of `problem` likes best.

For a period bound P the dynamic programme of `threshold` gives the best fill time h(P), which only falls as P grows. A
step takes `h(P) + (m - 1) P` (or `m P`), so on an interval [P1, P2] no plan is better than `h(P2) + (m - 1) P1`:
intervals are split, best bound first, until no bound is below the best plan found.
"""

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from coterie.planner.memory import tied_is_trained
from coterie.planner.problem import Cost, Problem, StageChoice, is_continuous
from coterie.planner.tables import DepthMode, Ints, Tables
from coterie.planner.threshold import Threshold

TOLERANCE = 1e-6
"""Relative; plans closer than this count as equally fast."""

TINY_S = 1e-9


class Candidate(NamedTuple):
    """A complete set of decisions and what the formula says about it."""

    problem: Problem
    stages: tuple[StageChoice, ...]
    cost: Cost


def most_stages(problem: Problem) -> int:
    """Devices that a plan may use at most."""
    request = problem.request
    most = min(len(problem.devices), problem.units)
    if request.max_stages is not None:
        most = min(most, request.max_stages)
    if problem.kind == "2bw":
        most = min(most, problem.micro_batches)
    if problem.kind == "stash" and tied_is_trained(problem.model):
        # Both ends would update their copy of the matrix at different times (METHODS 1: refused).
        most = 1
    return most


class TimeSearch:
    """Fastest candidate of one problem under given memory limits."""

    def __init__(self, tables: Tables, mode: DepthMode, limits: Ints) -> None:
        self.problem = tables.problem
        fixed = self.problem.request.fixed_stages
        self.most = most_stages(self.problem)
        self.least = self.problem.request.min_stages if fixed is None else len(fixed)
        self.periods_per_step = self.problem.micro_batches - (1 if not is_continuous(self.problem.kind) else 0)
        self._tables = tables
        self._mode: DepthMode = mode
        self._limits = limits
        self._fastest_s = tables.unit_s

    @cached_property
    def threshold(self) -> Threshold:
        """The dynamic programme; built only if `lowest_step_s` does not already rule out a better plan."""
        return Threshold(self._tables, self._mode, self._limits, self.most)

    def fastest(self, below_s: float = np.inf, most: int | None = None) -> Candidate | None:
        """The fastest candidate with at most `most` stages that takes less than `below_s`; None if there is none."""
        most = self.most if most is None else min(most, self.most)
        if most < self.least or self.lowest_step_s(most) >= below_s:
            return None
        lasts = self.threshold.lasts()
        if lasts == [None]:
            return _Run(self, below_s, most, None).search()
        return self._fastest_with_exchange(below_s, most, [last for last in lasts if last is not None])

    def _fastest_with_exchange(self, below_s: float, most: int, lasts: list[int]) -> Candidate | None:
        """The same when the two ends exchange a tied matrix: one search per last device, unless a bound rules it out.

        The search that leaves the exchange aside gives the bound; one device alone exchanges nothing.
        """
        free = _Run(self, below_s, most, None)
        best = free.search()
        if best is None:
            return None
        best = best if best.cost.step_s < below_s else None
        below_s = below_s if best is None else best.cost.step_s
        alone = _Run(self, below_s, 1, None).search() if self.least == 1 else None
        if alone is not None:
            best, below_s = alone, alone.cost.step_s
        others = range(len(self.problem.devices))
        cheapest = {
            last: min((self.problem.exchange_s(first, last) for first in others if first != last), default=0.0)
            for last in lasts
        }
        for last in sorted(lasts, key=cheapest.__getitem__):
            if free.best_s + cheapest[last] >= below_s * (1 - TOLERANCE):
                break
            found = _Run(self, below_s, most, last).search()
            if found is not None:
                best, below_s = found, found.cost.step_s
        return best

    def lowest_period_s(self, most: int) -> float:
        """No plan with `most` stages has a shorter period, memory and links left aside.

        Device w needs `c_w(u) >= share(u) C_w` for a unit, where C_w is the whole model's time and share(u) the least
        share that unit u has on any device; so `P sum(1 / C_w) >= sum(share)` over the devices used.
        """
        units = self._fastest_s
        whole = units.sum(axis=1)
        if not np.isfinite(units).all() or (whole <= 0).any():
            return TINY_S  # nothing takes time
        shares = (units / whole[:, None]).min(axis=0).sum()
        rates = np.sort(1 / whole)[::-1][:most].sum()
        return max(float(shares / rates), float(units.min(axis=0).max()), TINY_S)

    def lowest_step_s(self, most: int) -> float:
        """No plan with `most` stages has a shorter step."""
        fill = 0.0 if is_continuous(self.problem.kind) else float(self._fastest_s.min(axis=0).sum())
        fill = fill if np.isfinite(fill) else 0.0
        return max(fill + self.periods_per_step * self.lowest_period_s(most), self.problem.micro_batches * TINY_S)


class _Run:
    """One search: the best candidate so far and the intervals of P that may hold a better one."""

    def __init__(self, search: TimeSearch, below_s: float, most: int, last: int | None) -> None:
        self.lowest_s = search.lowest_period_s(most)
        self.problem = search.problem
        self.threshold = search.threshold
        self.per_step = search.periods_per_step
        self.least, self.most, self.last = search.least, most, last
        self.best_s = below_s
        self.best: Candidate | None = None
        self.intervals: list[tuple[float, float, float, float]] = []

    def search(self) -> Candidate | None:
        lowest = self.lowest_s
        highest = self.best_s / self.problem.micro_batches
        value = self._try(highest if np.isfinite(highest) else np.inf, lowest)
        if np.isfinite(value):
            self._push(lowest, self._useful(highest, value), value)
        while self.intervals:
            bound, low, high, value = heapq.heappop(self.intervals)
            if bound >= self.best_s * (1 - TOLERANCE):
                break
            high = self._useful(high, value)
            if high <= low * (1 + 2 * TOLERANCE):
                continue  # the plan at its upper end was tried, and none inside is better by more than that
            self._split(low, high, value)
        return self.best

    def _split(self, low: float, high: float, value: float) -> None:
        at_best = self.best is not None and high >= self.best.cost.period_s * (1 - 1e-9)
        middle = (low * high) ** 0.5 if high > 2 * low else (low + high) / 2
        if at_best and high < low * 1.03:
            # Most likely nothing is better than the best one: a bound just below it proves that at once.
            middle = high * (1 - TOLERANCE)  # above `low`: the interval is at least twice as wide
        below = self._try(middle, low)
        if np.isfinite(below):
            self._push(low, self._useful(middle, below), below)
        self._push(middle, high, value)

    def _try(self, period_s: float, low: float) -> float:
        """Best value at a period bound; remember the pipeline behind it if it may be the best."""
        evaluation = self.threshold.evaluate(period_s, self.most, self.last)
        values = evaluation.values[self.least - 1 :]
        stages = int(values.argmin()) + self.least
        value = float(evaluation.values[stages - 1])
        if np.isfinite(value) and value + self.per_step * low < self.best_s:
            chain = self.threshold.trace(evaluation, stages)
            cost = self.problem.cost(chain)
            # Without a last device the exchange is left aside, in the bounds and so here too.
            aside_s = self.problem.exchange_s(chain[0].device, chain[-1].device) if self.last is None else 0.0
            if cost.step_s - aside_s < self.best_s:
                self.best_s = cost.step_s - aside_s
                self.best = Candidate(self.problem, tuple(chain), cost)
        return value

    def _useful(self, high: float, value: float) -> float:
        """Upper end of the periods that can still beat the best plan, given the best value on the interval."""
        if self.per_step == 0 or not np.isfinite(self.best_s):
            return high
        return min(high, (self.best_s - value) / self.per_step)

    def _push(self, low: float, high: float, value: float) -> None:
        bound = value + self.per_step * low
        if high > low and bound < self.best_s * (1 - TOLERANCE):
            heapq.heappush(self.intervals, (bound, low, high, value))


def fastest_of(searches: Sequence[TimeSearch], below_s: float = np.inf, most: int | None = None) -> Candidate | None:
    """The fastest candidate over several micro-batch counts."""
    best: Candidate | None = None
    most_of = {id(search): search.most if most is None else min(most, search.most) for search in searches}
    for search in sorted(searches, key=lambda search: search.lowest_step_s(max(most_of[id(search)], 1))):
        found = search.fastest(below_s, most)
        if found is not None:
            best, below_s = found, found.cost.step_s
    return best
