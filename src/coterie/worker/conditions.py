"""What the owner of a device allows: when its worker must leave, and how much of the processor it may take. Pure."""

import msgspec

from coterie.units import format_seconds

GRACE_S = 10.0
"""A plug that is moved to another socket, a sensor's single peak: no reason to leave."""

TOUCHED_S = 30.0
"""Somebody who has touched keyboard or mouse since so long works here."""

BUSY_CORES = 0.5
"""Other programs that keep so much of a core busy are somebody's work,"""

BUSY_S = 3.0
"""if they do so for so long: a look for updates is over before."""

IDLE_AGAIN_S = 60.0
"""Nobody has worked for so long: the worker may take its full share again."""


class OwnerConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's terms.

    Attributes:
        only_on_power: Leave when unplugged.
        min_battery: Leave when the charge is down to this, 0 to 1, and it is not plugged in.
        max_celsius: Leave when hotter; None: no such limit.
        share: Of a core's speed, above 0 up to 1, while nobody works here.
        yields_to: The share while the owner works here; None: the same.
    """

    only_on_power: bool = False
    min_battery: float = 0.0
    max_celsius: float | None = None
    share: float = 1.0
    yields_to: float | None = None


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the device at one moment; None where nothing is."""

    battery: float | None = None
    on_power: bool | None = None
    celsius: float | None = None
    others_cores: float = 0.0
    idle_s: float | None = None


class OwnerState(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen before: since when a term is broken, and since when somebody works here."""

    broken_since_s: float | None = None
    busy_since_s: float | None = None
    worked_at_s: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker does now.

    Attributes:
        leave: Why it must leave; empty: it may stay.
        share: Of a core's speed that it may take.
        yields: Whether that is because the owner works.
    """

    leave: str = ""
    share: float = 1.0
    yields: bool = False


def broken_term(conditions: OwnerConditions, seen: Seen) -> str:
    """The term that does not hold now, in words; empty if all do. What nobody can tell breaks none."""
    unplugged = seen.on_power is False
    if conditions.only_on_power and unplugged:
        return "it is not plugged in, and its owner lets it compute on power only"
    if seen.battery is not None and not seen.on_power and seen.battery <= conditions.min_battery > 0:
        return f"its battery is down to {seen.battery:.0%} (its owner's limit is {conditions.min_battery:.0%})"
    if conditions.max_celsius is not None and seen.celsius is not None and seen.celsius > conditions.max_celsius:
        return f"it is {seen.celsius:.0f} °C hot (its owner's limit is {conditions.max_celsius:.0f} °C)"
    return ""


def consider(state: OwnerState, conditions: OwnerConditions, seen: Seen, now_s: float) -> tuple[OwnerState, Verdict]:
    """What the worker does from now on."""
    broken = broken_term(conditions, seen)
    since_s = None if not broken else now_s if state.broken_since_s is None else state.broken_since_s
    leave = broken if since_s is not None and now_s - since_s >= GRACE_S else ""
    state = _noted(msgspec.structs.replace(state, broken_since_s=since_s), seen, now_s)
    works = state.worked_at_s is not None and now_s - state.worked_at_s < IDLE_AGAIN_S
    if conditions.yields_to is None or not works:
        return state, Verdict(leave=leave, share=conditions.share)
    return state, Verdict(leave=leave, share=min(conditions.yields_to, conditions.share), yields=True)


def _noted(state: OwnerState, seen: Seen, now_s: float) -> OwnerState:
    """Whether somebody works here at this moment."""
    busy_since_s = None
    if seen.others_cores >= BUSY_CORES:
        busy_since_s = now_s if state.busy_since_s is None else state.busy_since_s
    busy = busy_since_s is not None and now_s - busy_since_s >= BUSY_S
    touched = seen.idle_s is not None and seen.idle_s < TOUCHED_S
    worked_at_s = now_s if busy or touched else state.worked_at_s
    return msgspec.structs.replace(state, busy_since_s=busy_since_s, worked_at_s=worked_at_s)


def describe(verdict: Verdict, before: Verdict) -> str:
    """What to tell the owner when the share changes; empty if it does not."""
    if verdict.yields == before.yields:
        return ""
    if verdict.yields:
        return f"its owner works here: the worker takes {verdict.share:.0%} of a core's speed"
    return f"nobody has worked here for {format_seconds(IDLE_AGAIN_S)}: the worker takes {verdict.share:.0%} again"
