"""The best pipeline whose period is at most P, over all cuts, device orders and subsets: a dynamic programme.

A pipeline is built from its last stage to its first. Of all ways to place units [u, N) on a set of devices, first of
them device v, only the one with the least `A` (see `problem`) matters: a smaller `A` allows every stage before it at
least as much, under the period bound (`A_s <= P d_s`) and in the objective. So one number per (set, v, u) is exact, and
the work is `2^W W^2 N^2` at most; at a useful P a stage holds few units, which makes it far less.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.planner.plan import Codec
from coterie.planner.problem import Floats, Problem, StageChoice, is_continuous
from coterie.planner.subsets import Growth
from coterie.planner.tables import OPTIONS, DepthMode, Ints, Tables

ROUNDING = 1 + 1e-12


class Variant(NamedTuple):
    """Seconds of all stages in one place, in the shape that the programme reads.

    Attributes:
        seconds: [W, N, N]: device, first unit, further units in the stage; infinite where not allowed.
        caps: Same shape: the depth that bounds `A_s <= P d_s`; infinite where nothing bounds it.
        cap: The one value of `caps`, if they are all equal.
    """

    seconds: Floats
    caps: Floats
    cap: float | None


class End(NamedTuple):
    """Where a complete pipeline's chain starts, to trace it back."""

    devices: int
    first: int


class Evaluation(NamedTuple):
    """Best value per number of stages (index 0: one stage) at one period bound, and how to find the pipelines."""

    period_s: float
    values: Floats
    ends: tuple[End | None, ...]
    away_s: Floats


class Threshold:
    """The dynamic programme of one problem, depth mode and set of memory limits."""

    def __init__(self, tables: Tables, mode: DepthMode, limits: Ints, most_stages: int) -> None:
        self.problem = tables.problem
        self.mode: DepthMode = mode
        self.most = most_stages
        self.growth = Growth(self.problem, most_stages)
        self._tables = tables
        self._deepest = [tables.deepest(option, limits) for option in range(len(OPTIONS))]
        self._variants = [self._make_variants(place) for place in range(1, most_stages + 1)]
        self._links = _Links(self.problem)
        count = len(self.problem.devices)
        self._exchange_s: Floats = np.array(
            [[self.problem.exchange_s(first, last) for last in range(count)] for first in range(count)]
        )
        self._sizes = _popcounts(1 << count)
        self._continuous = is_continuous(self.problem.kind)

    def evaluate(self, period_s: float, most_stages: int, last: int | None = None) -> Evaluation:
        """For each number of stages up to `most_stages`: the least `A_0` (or 0) plus exchange at this period bound.

        With `last` only pipelines that end on that device, and with their exchange of a tied matrix.
        """
        away = self._grow(period_s, most_stages, last)
        whole = away[:, :, 0]
        exchange = self._exchange_s[:, last] if last is not None else 0.0
        value = np.where(np.isfinite(whole), (0.0 if self._continuous else whole) + exchange, np.inf)
        values = np.full(most_stages, np.inf)
        ends: list[End | None] = [None] * most_stages
        for stages in range(1, most_stages + 1):
            masked = np.where((self._sizes == stages)[:, None], value, np.inf)
            subset, first = divmod(int(masked.argmin()), value.shape[1])
            if masked[subset, first] < np.inf:
                values[stages - 1] = masked[subset, first]
                ends[stages - 1] = End(subset, first)
        return Evaluation(period_s, values, tuple(ends), away)

    def lasts(self) -> list[int | None]:
        """What to pass as `last`, one after the other: every device if pipelines must exchange a tied matrix."""
        return list(self.growth.first) if self._exchange_s.any() else [None]

    def _make_variants(self, place: int) -> list[Variant]:
        """Options of a stage `place` stages from the end; those with one common cap are merged into the fastest."""
        required = self._tables.required_depth(place, self.mode)
        variants = []
        for option, seconds in enumerate(self._tables.compute_s):
            allowed = np.where(self._deepest[option] >= required, seconds, np.inf)
            caps = self._caps(option, place)
            cap = float(caps.flat[0]) if (caps == caps.flat[0]).all() else None
            variants.append(Variant(_to_bands(allowed), _to_bands(caps), cap))
        if variants[0].cap is not None and all(variant.cap == variants[0].cap for variant in variants):
            return [variants[0]._replace(seconds=np.minimum.reduce([variant.seconds for variant in variants]))]
        return [variant for variant in variants if np.isfinite(variant.seconds).any()]

    def _caps(self, option: int, place: int) -> Floats:
        problem = self.problem
        if self.mode == "textbook" or problem.kind in {"gpipe", "forward"}:
            cap = float(place) if problem.is_limited(place) else np.inf
            return np.full(self._deepest[option].shape, cap)
        caps = np.maximum(self._deepest[option], 1).astype(np.float64)
        if problem.kind == "2bw":
            caps = np.minimum(caps, problem.micro_batches)
        elif problem.kind == "flush":
            caps = np.where(caps >= problem.micro_batches, np.inf, caps)
        return caps

    def _grow(self, period_s: float, most_stages: int, last: int | None) -> Floats:
        """[2^W, W, N+1]: least `A` of units [u, N) on a set of devices whose first stage is on v."""
        count, units = len(self.problem.devices), self.problem.units
        away = np.full((1 << count, count, units + 1), np.inf)
        link_s = self._links.within(period_s)
        # The last stage ends at unit N, and nothing follows it.
        nothing_follows = np.full((1, units + 1), np.inf)
        nothing_follows[0, units] = 0.0
        for device in self.growth.first:
            if last is None or device == last:
                away[1 << device, device, :units] = self._prepend(1, device, nothing_follows, period_s)[0]
        for placed, step in enumerate(self.growth.steps[: most_stages - 1], start=1):
            for device, all_hosts in step:
                hosts = all_hosts if last is None else all_hosts[all_hosts >> last & 1 > 0]
                if not len(hosts):
                    continue
                following = (away[hosts] + link_s[device]).min(axis=1)
                away[hosts | 1 << device, device, :units] = self._prepend(placed + 1, device, following, period_s)
        return away

    def _prepend(self, place: int, device: int, following: Floats, period_s: float) -> Floats:
        """[sets, N]: least `A` when a stage on `device` starting at each unit is put before `following` [sets, N+1]."""
        units = self.problem.units
        best = np.full((len(following), units), np.inf)
        for variant in self._variants[place - 1]:
            seconds = variant.seconds[device]
            lengths = np.flatnonzero(seconds.min(axis=0) <= period_s * ROUNDING)
            if not len(lengths):
                continue
            longest = int(lengths[-1]) + 1
            band = np.where(seconds[:, :longest] <= period_s * ROUNDING, seconds[:, :longest], np.inf)
            total = _windows(following, longest)
            total += band
            if variant.cap is None:
                caps = variant.caps[device, :, :longest]
                total[total > period_s * ROUNDING * caps] = np.inf
            shortest = total.min(axis=2)
            if variant.cap is not None:
                shortest[shortest > period_s * ROUNDING * variant.cap] = np.inf
            np.minimum(best, shortest, out=best)
        return best

    def trace(self, evaluation: Evaluation, stages: int) -> list[StageChoice]:
        """The pipeline behind a finite value of `evaluate`, first stage first, with depths."""
        end = evaluation.ends[stages - 1]
        assert end is not None, "no pipeline of this many stages at this bound"
        away = evaluation.away_s
        period_s = evaluation.period_s
        link_s = self._links.within(period_s)
        subset, device, first = end.devices, end.first, 0
        chain: list[StageChoice] = []
        caps: list[float] = []
        for place in range(stages, 0, -1):
            rest = subset & ~(1 << device)
            stop, follower, option = self._next(place, device, first, away[rest] + link_s[device], period_s)
            codec = self._links.codec(device, follower, stop, period_s) if place > 1 else "fp32"
            caps.append(float(self._caps(option, place)[device, first, stop]))
            chain.append(
                StageChoice(
                    device=device,
                    first_unit=first,
                    stop_unit=stop,
                    depth=int(min(caps[-1], self._tables.max_depth)),
                    recompute=OPTIONS[option].recompute,
                    allocator=OPTIONS[option].allocator,
                    codec=codec,
                )
            )
            subset, device, first = rest, follower, stop
        return self._with_depths(chain, caps)

    def _next(self, place: int, device: int, first: int, following: Floats, period_s: float) -> tuple[int, int, int]:
        """Stop unit, following device and option of the stage that gave the value at (`device`, `first`)."""
        units = self.problem.units
        required = self._tables.required_depth(place, self.mode)
        ahead = np.full((1, units + 1), np.inf)
        ahead[0, units] = 0.0
        totals = np.full((len(OPTIONS), units + 1, len(self.problem.devices)), np.inf)
        for option, seconds in enumerate(self._tables.compute_s):
            own = np.where(self._deepest[option][device, first] >= required, seconds[device, first], np.inf)
            own = np.where(own <= period_s * ROUNDING, own, np.inf)
            total = own[:, None] + (following.T if place > 1 else ahead.T)
            limit = period_s * ROUNDING * self._caps(option, place)[device, first]
            totals[option] = np.where(total <= limit[:, None], total, np.inf)
        best, stop, follower = np.unravel_index(int(totals.argmin()), totals.shape)
        return int(stop), int(follower), int(best)

    def _with_depths(self, chain: list[StageChoice], caps: list[float]) -> list[StageChoice]:
        """Give each stage the textbook depth, or what its period needs where that differs and the mode allows it."""
        problem = self.problem
        if problem.kind == "gpipe":
            return [_at_depth(stage, problem.micro_batches) for stage in chain]
        if problem.kind == "forward":
            return [_at_depth(stage, 1) for stage in chain]
        stages = len(chain)
        if self.mode == "textbook":
            return [_at_depth(stage, stages - number) for number, stage in enumerate(chain)]
        cost = problem.cost(chain)
        deepened: list[StageChoice] = []
        before = self._tables.max_depth
        for number, (stage, cap) in enumerate(zip(chain, caps, strict=True)):
            needed = int(np.ceil(cost.away_s[number] / cost.period_s - 1e-9))
            depth = max(stages - number, needed, 1)
            if problem.kind != "stash":
                depth = min(depth, problem.micro_batches)
            before = int(min(depth, cap, before))
            deepened.append(_at_depth(stage, before))
        return deepened


class _Links:
    """Seconds per micro-batch on every link at every cut, with the fastest permitted codec."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.codecs: tuple[Codec, ...] = problem.request.codecs
        count = len(problem.devices)
        shape = (len(self.codecs), count, count, problem.units + 1)
        self.round_s = np.full(shape, np.inf)
        self.busy_s = np.full(shape, np.inf)
        between = ~np.eye(count, dtype=np.bool_)[:, :, None]
        for number, codec in enumerate(self.codecs):
            there, back = problem.transfers_s(codec)
            round_s = there + back + problem.round_trip_latencies_s()[:, :, None]
            busy_s = there + back if problem.kind == "gpipe" else np.maximum(there, back)
            self.round_s[number] = np.where(between, round_s, np.inf)
            self.busy_s[number] = np.where(between, busy_s, np.inf)

    def within(self, period_s: float) -> Floats:
        """[W, W, N+1]: round trip at each cut; infinite where the link is busy for longer than the period."""
        return np.asarray(self._allowed(period_s).min(axis=0), dtype=np.float64)

    def codec(self, source: int, target: int, stop: int, period_s: float) -> Codec:
        """The codec behind `within`."""
        return self.codecs[int(self._allowed(period_s)[:, source, target, stop].argmin())]

    def _allowed(self, period_s: float) -> Floats:
        return np.where(self.busy_s <= period_s * ROUNDING, self.round_s, np.inf)


def _at_depth(stage: StageChoice, depth: int) -> StageChoice:
    return StageChoice(
        device=stage.device,
        first_unit=stage.first_unit,
        stop_unit=stage.stop_unit,
        depth=depth,
        recompute=stage.recompute,
        allocator=stage.allocator,
        codec=stage.codec,
    )


def _windows(following: Floats, longest: int) -> Floats:
    """[sets, first, further]: `following` [sets, N+1] at first + 1 + further; infinite beyond the last unit."""
    sets, units = following.shape[0], following.shape[1] - 1
    padded = np.full((sets, units + longest), np.inf)
    padded[:, :units] = following[:, 1:]
    row, item = padded.strides
    return np.ndarray((sets, units, longest), np.float64, padded, 0, (row, item, item)).copy()


def _to_bands(values: Floats) -> Floats:
    """From [W, first, stop] to [W, first, stop - first - 1], infinite beyond the last unit."""
    units = values.shape[1] - 1
    first = np.arange(units)[:, None]
    stop = first + 1 + np.arange(units)[None, :]
    return np.where(stop <= units, values[:, first, np.minimum(stop, units)], np.inf)


def _popcounts(count: int) -> NDArray[np.int64]:
    return np.array([number.bit_count() for number in range(count)], dtype=np.int64)
