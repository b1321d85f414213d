"""Sets of counts that backends compute within a time, and whether they add up; sets are bits of whole numbers."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import or_

import msgspec

from coterie.profiles.backend_profile import ShareTiming, Strategy


class ShareCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What each possible share costs on one backend; the whole part is none, since then there is nobody beside it.

    Attributes:
        name: The backend's.
        alone_s: Seconds of the whole part, by itself; infinite if that was not measured.
        step: What counts are multiples of: bit i of a set stands for the count i * step.
        seconds: By count, neither 0 nor all among them.
        strategies: By measured count.
        times: The different seconds, rising.
        within: The set of counts that take at most `times[i]`; 0 is always in.
    """

    name: str
    alone_s: float
    step: int
    seconds: dict[int, float]
    strategies: dict[int, Strategy]
    times: tuple[float, ...]
    within: tuple[int, ...]

    def counts_within(self, seconds: float) -> int:
        """The set of counts that take at most this long, and 0."""
        known = bisect_right(self.times, seconds)
        return self.within[known - 1] if known else 1


def share_costs(
    name: str, timings: Sequence[ShareTiming], total: int, step: int | None, slowed: float = 1.0
) -> ShareCosts:
    """Costs out of timings by rising count, none above `total`; for `step` and `slowed` see `allocate_part`."""
    assert timings, "a backend without timings has no costs"
    assert timings[-1].count <= total, f"{name} was measured with more than {total}"
    beside = times_as_long(timings, slowed)
    seconds = {t.count: t.seconds for t in beside} if step is None else _interpolated(beside, step)
    seconds.pop(total, None)
    unit = step or 1
    ordered = sorted((s, count // unit) for count, s in seconds.items())
    return ShareCosts(
        name=name,
        alone_s=timings[-1].seconds if timings[-1].count == total else math.inf,
        step=unit,
        seconds=seconds,
        strategies={t.count: t.strategy for t in timings},
        times=tuple(s for s, _ in ordered),
        within=tuple(accumulate((1 << index for _, index in ordered), or_, initial=1))[1:],
    )


def times_as_long(timings: Sequence[ShareTiming], factor: float) -> tuple[ShareTiming, ...]:
    """Timings of a backend that takes `factor` times as long."""
    return tuple(
        msgspec.structs.replace(
            timing,
            seconds=timing.seconds * factor,
            fused_s=timing.fused_s * factor,
            each_s=None if timing.each_s is None else timing.each_s * factor,
        )
        for timing in timings
    )


def _interpolated(timings: Sequence[ShareTiming], step: int) -> dict[int, float]:
    """Seconds of every multiple of `step` up to the largest measured count; as the smallest below that."""
    first = timings[0]
    seconds = dict.fromkeys(range(step, first.count + 1, step), first.seconds)
    for low, high in pairwise(timings):
        slope = (high.seconds - low.seconds) / (high.count - low.count)
        start = low.count // step * step + step
        seconds |= {count: low.seconds + slope * (count - low.count) for count in range(start, high.count + 1, step)}
    # Rounding must not make a measured count another one.
    return seconds | {t.count: t.seconds for t in timings if t.count % step == 0}


def fastest_time(costs: Sequence[ShareCosts], total: int) -> float:
    """The least time within which several backends compute `total`; infinite if their counts cannot add up."""
    times = sorted({time for cost in costs for time in cost.times})
    index = bisect_left(times, 1, key=lambda time: int(_adds_up(costs, total, time)))
    return times[index] if index < len(times) else float("inf")


def deal(costs: Sequence[ShareCosts], total: int, seconds: float) -> dict[str, int]:
    """Counts that add up to `total`, all within `seconds` (feasible): the slower a backend, the less it gets."""
    # Who computes least within the time is slowest; of equals the last.
    order = sorted(range(len(costs)), key=lambda i: (costs[i].counts_within(seconds).bit_length(), -i))
    slowest_first = [costs[i] for i in order]
    step = costs[0].step
    limit = total // step
    reached = [1]  # what the backends after the i-th reach together, backwards
    for cost in reversed(slowest_first[1:]):
        reached.append(_sums(reached[-1], cost.counts_within(seconds), limit))
    counts = {}
    left = limit
    for cost, rest in zip(slowest_first, reversed(reached), strict=True):
        count = next(i for i in _bits(cost.counts_within(seconds)) if i <= left and rest >> (left - i) & 1)
        counts[cost.name] = count * step
        left -= count
    assert left == 0, "the counts of a feasible time add up"
    return counts


def _adds_up(costs: Sequence[ShareCosts], total: int, seconds: float) -> bool:
    reached = 1
    for cost in costs:
        reached = _sums(reached, cost.counts_within(seconds), total // cost.step)
    return bool(reached >> total // costs[0].step & 1) if costs else False


def _sums(left: int, right: int, limit: int) -> int:
    """The set of all sums of a number of each set, up to `limit`. Fast where `right` has few gaps."""
    sums = 0
    while right:
        start = (right & -right).bit_length() - 1
        run = right >> start
        length = (~run & (run + 1)).bit_length() - 1
        sums |= _smeared(left << start, length)
        right = right >> (start + length) << (start + length)
    return sums & ((2 << limit) - 1)


def _smeared(bits: int, length: int) -> int:
    """The set with 0 to `length` - 1 added to each of its numbers."""
    width = 1
    while width < length:
        by = min(width, length - width)
        bits |= bits << by
        width += by
    return bits


def _bits(numbers: int) -> Iterator[int]:
    """The numbers of a set, rising."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest
