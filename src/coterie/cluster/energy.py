"""When a device's battery will be down to its reserve, and when its layers must have left it by then. Pure."""

import statistics
from collections.abc import Sequence
from itertools import combinations

import msgspec

from coterie.units import format_seconds

WINDOW_S = 900.0
"""Older samples say nothing about what the device draws now."""

LEAST_SAMPLES = 4
"""Fewer make no line."""

LEAST_DROP = 0.02
"""Charge is told in whole percents: with less than two of them gone since, nobody knows how fast it falls."""

MOST_POINTS = 60
"""Samples that the line is fitted through; of more, evenly spread ones are taken."""


class BatterySample(msgspec.Struct, frozen=True, kw_only=True):
    """What a device said of its battery: charge 0 to 1; `on_power` None if it cannot tell."""

    at_s: float
    charge: float
    on_power: bool | None = None


class EnergyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a device's owner permits.

    Attributes:
        reserve: Charge at which the device must have nothing left to do, unless it is plugged in.
        only_on_power: Leave at once when unplugged.
        safety: How many times the seconds of a move must be left when it begins.
        least_lead_s: Begin so many seconds before the predicted end in any case.
    """

    reserve: float = 0.2
    only_on_power: bool = False
    safety: float = 3.0
    least_lead_s: float = 60.0


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """Move this device's layers now; it has `left_s` until its reserve."""

    left_s: float
    reason: str


def end_of_charge_s(history: Sequence[BatterySample], *, reserve: float = 0.2) -> float | None:
    """Predicted seconds, from the last sample on, until the charge is down to `reserve`.

    The line through the last minutes since it was unplugged is the median of slopes (Theil and Sen), of pairs far
    enough apart that whole percents do not matter. None: plugged in, or not falling, or nobody knows yet.
    """
    if not history or history[-1].on_power:
        return None
    last = history[-1]
    if last.charge <= reserve:
        return 0.0
    points = _thinned(_since_unplugged(history))
    if len(points) < LEAST_SAMPLES or points[0].charge - last.charge < LEAST_DROP:
        return None
    apart_s = (last.at_s - points[0].at_s) / 2
    slopes = [
        (later.charge - earlier.charge) / (later.at_s - earlier.at_s)
        for earlier, later in combinations(points, 2)
        if later.at_s - earlier.at_s >= apart_s > 0
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    return (last.charge - reserve) / -slope if slope < 0 else None


def _since_unplugged(history: Sequence[BatterySample]) -> list[BatterySample]:
    """The last samples in a row without power, of the last `WINDOW_S`."""
    kept: list[BatterySample] = []
    for sample in reversed(history):
        if sample.on_power or history[-1].at_s - sample.at_s > WINDOW_S:
            break
        kept.append(sample)
    return kept[::-1]


def _thinned(samples: list[BatterySample]) -> list[BatterySample]:
    if len(samples) <= MOST_POINTS:
        return samples
    step = (len(samples) - 1) / (MOST_POINTS - 1)
    return [samples[round(number * step)] for number in range(MOST_POINTS)]


def should_hand_over(
    history: Sequence[BatterySample],
    policy: EnergyPolicy,
    *,
    remaining_s: float,
    move_s: float,
    handed_over: bool = False,
) -> HandOver | None:
    """Must this device's layers leave it now?

    Not before it is necessary, since what a battery lets a device compute is of use; and early enough that the move is
    over by then.

    Args:
        history: Its battery, oldest first.
        policy: What its owner permits.
        remaining_s: Predicted seconds until the run ends.
        move_s: Predicted seconds of moving its layers.
        handed_over: Its layers are leaving, or have left: nothing is handed over twice.
    """
    if handed_over or not history or history[-1].on_power:
        return None
    last = history[-1]
    if policy.only_on_power and last.on_power is False:
        return HandOver(left_s=0.0, reason="it is not plugged in, and its owner lets it compute on power only")
    left_s = end_of_charge_s(history, reserve=policy.reserve)
    if left_s is None or left_s >= remaining_s:
        return None
    if left_s > max(policy.safety * move_s, policy.least_lead_s):
        return None
    when = f"its battery, at {last.charge:.0%}, is down to {policy.reserve:.0%}"
    if left_s <= 0:
        return HandOver(left_s=0.0, reason=when)
    return HandOver(
        left_s=left_s,
        reason=f"{when} in {format_seconds(left_s)}, and the run takes {format_seconds(remaining_s)} more",
    )
