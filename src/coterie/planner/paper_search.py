"""The paper's way of allocating heads, to compare with; runs use `head_allocation.allocate_part`."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from coterie.planner.head_allocation import PartAllocation, PartShare
from coterie.profiles.backend_profile import ShareTiming

_HALVINGS = 50
"""Halving a second this often leaves less than a femtosecond."""


def allocate_by_binary_search(
    timings: Mapping[str, Sequence[ShareTiming]], total: int, *, most_deviation: float = 0.5
) -> PartAllocation | None:
    """A binary search on the time within which all participating backends finish (METHODS 1.3).

    The paper says: profile each backend with every head count, search by bisection for the time at which all backends
    finish together, and bypass a backend whose time deviates beyond a threshold. It does not say how large the
    threshold is, nor what happens if no time gives exactly all heads. Our reading: for a time T each backend gets the
    first count after which its next one would take longer than T; the sum of counts rises with T, so T is bisected
    until the sum is `total`. Backends without heads are bypassed, and the one whose seconds are furthest from the mean
    if that is more than `most_deviation` of it; then the search begins again with the others.

    Args:
        timings: By backend and rising count.
        total: KV groups of a layer.
        most_deviation: The threshold, as a share of the mean.

    Returns:
        The allocation, or None: the sum jumps over `total` at some time, and the search ends without an answer.
    """
    best = min(
        (name for name, found in timings.items() if found and found[-1].count == total),
        key=lambda name: timings[name][-1].seconds,
    )
    kept = [name for name, found in timings.items() if found]
    left_out = {name: "it was not measured with this part" for name, found in timings.items() if not found}
    while True:
        chosen = _bisect({name: timings[name] for name in kept}, total)
        if chosen is None:
            return None
        mean = fmean(timing.seconds for timing in chosen.values())
        furthest = max(reversed(chosen), key=lambda name: abs(chosen[name].seconds - mean))
        away = abs(chosen[furthest].seconds / mean - 1)
        left_out |= {name: "no head fits into the common time" for name in kept if name not in chosen}
        if away <= most_deviation and len(chosen) == len(kept):
            break
        if away > most_deviation:
            left_out[furthest] = f"{away:.0%} away from the mean"
        kept = [name for name in chosen if name not in left_out]
    return PartAllocation(
        shares=tuple(
            PartShare(backend=name, count=t.count, strategy=t.strategy, predicted_s=t.seconds)
            for name, t in chosen.items()
        ),
        predicted_s=max(timing.seconds for timing in chosen.values()),
        best_single_s=timings[best][-1].seconds,
        best_single=best,
        left_out=left_out,
    )


def _bisect(timings: Mapping[str, Sequence[ShareTiming]], total: int) -> dict[str, ShareTiming] | None:
    """What each backend gets at a time where the counts add up to `total`; None if the search meets no such time."""
    low, high = 0.0, max(timing.seconds for found in timings.values() for timing in found)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        chosen = {name: timing for name, found in timings.items() if (timing := _last_within(found, middle))}
        count = sum(timing.count for timing in chosen.values())
        if count == total:
            return chosen
        low, high = (middle, high) if count < total else (low, middle)
    return None


def _last_within(timings: Sequence[ShareTiming], seconds: float) -> ShareTiming | None:
    """The last timing before the first one that takes longer."""
    last = None
    for timing in timings:
        if timing.seconds > seconds:
            return last
        last = timing
    return last
