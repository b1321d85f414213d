"""When backends' shares are dealt out anew in mid-run: they take other times than were measured, or one has failed."""

from collections.abc import Collection, Mapping

import msgspec

from coterie.planner.head_allocation import allocate
from coterie.planner.share_costs import times_as_long
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation

DRIFT = 0.3
"""How much more than another's a backend's seconds may have grown against what was measured."""

WINDOW_JOBS = 50
"""Forwards and backwards of every backend that must have been seen since shares were dealt out."""

LONGEST_WINDOW_JOBS = 20 * WINDOW_JOBS
"""Then one begins to look anew: else a backend that is slowed late in a run would hide behind its long past."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend did in a while: forwards and backwards, and the seconds they took."""

    jobs: int
    busy_s: float


class Dealt(msgspec.Struct, frozen=True, kw_only=True):
    """Shares, and the timings that they were made from."""

    profiles: DeviceBackends
    allocation: HeadAllocation


def dealt_anew(dealt: Dealt, work: Mapping[str, Work], gone: frozenset[str] = frozenset()) -> Dealt | None:
    """Other shares, if there is reason for them: a backend is gone, or drifts from the others by more than `DRIFT`.

    Only how backends compare matters: longer texts slow all of them alike, and change no share. Timings are not taken
    again, which would stop the run; those at hand are multiplied by what the backend takes now.

    Args:
        dealt: What stands.
        work: Of each backend since then.
        gone: Backends that are used no more.

    Returns:
        The new shares, or None while those that stand are right, or nobody knows yet.
    """
    grown = _growth(dealt.allocation, {name: one for name, one in work.items() if name not in gone})
    lost = any(share.backend in gone for part in _parts(dealt.allocation) for share in part.shares)
    drifted = len(grown) > 1 and max(grown.values()) > (1 + DRIFT) * min(grown.values())
    if not lost and not drifted:
        return None
    profiles = without(_scaled(dealt.profiles, grown if drifted else {}), gone)
    if not profiles.backends:
        return None
    allocation = allocate(profiles)
    return Dealt(profiles=profiles, allocation=allocation)


def _growth(allocation: HeadAllocation, work: Mapping[str, Work]) -> dict[str, float]:
    """Seconds now over seconds predicted, by backend; nothing until each has done enough."""
    predicted_s: dict[str, float] = {}
    parts: dict[str, int] = {}
    for part in _parts(allocation):
        for share in part.shares:
            predicted_s[share.backend] = predicted_s.get(share.backend, 0.0) + share.predicted_s
            parts[share.backend] = parts.get(share.backend, 0) + 1
    known = {name: one for name, one in work.items() if name in predicted_s}
    # A clock that did not move says nothing either.
    if any(one.jobs < WINDOW_JOBS or one.busy_s * predicted_s[name] <= 0 for name, one in known.items()):
        return {}
    # A prediction is for a forward and a backward of each part.
    return {name: one.busy_s / (one.jobs / (2 * parts[name]) * predicted_s[name]) for name, one in known.items()}


def _scaled(profiles: DeviceBackends, grown: Mapping[str, float]) -> DeviceBackends:
    """Timings of backends that took part as they are now; those of the others as the least changed one's."""
    usual = min(grown.values(), default=1.0)
    backends = tuple(
        msgspec.structs.replace(
            backend,
            attention=times_as_long(backend.attention, grown.get(backend.name, usual)),
            neurons=times_as_long(backend.neurons, grown.get(backend.name, usual)),
        )
        for backend in profiles.backends
    )
    return msgspec.structs.replace(profiles, backends=backends)


def without(profiles: DeviceBackends, gone: Collection[str]) -> DeviceBackends:
    """What was measured of the backends that are not gone."""
    left = tuple(backend for backend in profiles.backends if backend.name not in gone)
    # What they took beside one that is gone is nearer to what they will take than what each took alone.
    together = tuple(
        msgspec.structs.replace(tried, backends=tuple(name for name in tried.backends if name not in gone))
        for tried in profiles.together
    )
    return msgspec.structs.replace(
        profiles,
        backends=left,
        together=together,
        groups=profiles.groups if _whole(left, profiles.groups, heads=True) else 0,
        neurons=profiles.neurons if _whole(left, profiles.neurons, heads=False) else 0,
    )


def _whole(backends: tuple[BackendProfile, ...], total: int, *, heads: bool) -> bool:
    timings = [backend.attention if heads else backend.neurons for backend in backends]
    return any(found and found[-1].count == total for found in timings)


def _parts(allocation: HeadAllocation) -> list[PartAllocation]:
    return [part for part in (allocation.attention, allocation.neurons) if part is not None]
