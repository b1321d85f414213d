"""How many heads and neurons each backend of a device gets, so that all finish together (METHODS 1.3)."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType

import msgspec

from coterie.planner.share_costs import ShareCosts, deal, fastest_time, share_costs
from coterie.profiles.backend_profile import DeviceBackends, Part, ShareTiming
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation, PartShare
from coterie.units import counted, format_seconds

__all__ = ["LEAST_GAIN", "HeadAllocation", "PartAllocation", "PartShare", "allocate", "allocate_part"]

LEAST_GAIN = 0.03
"""A backend is left out that makes a part less than this much faster: measurements are not much better than that, and
every further backend copies inputs and gradients."""

_NEURON_STEPS = (16, 8, 4, 2)
_LEAST_STEPS = 64
"""Neurons are dealt out in the largest of these steps that divides a layer's into at least 64: matrix products like
whole vector registers."""


def allocate(profiles: DeviceBackends, *, least_gain: float = LEAST_GAIN) -> HeadAllocation:
    """The fastest allocation of both parts of a layer.

    They run one after the other, so that each is allocated by itself. On the processor backends' seconds hold together
    only while all their threads have cores, so at most as many are chosen; and if groups of them were tried side by
    side, it is one of these groups, with the seconds that it took then.

    Args:
        profiles: The measured backends; summing and dealing out follow their order.
        least_gain: See `allocate_part`.
    """
    attention = _noted(_best_group(profiles, "attention", least_gain), profiles, "attention")
    neurons = _noted(_best_group(profiles, "neurons", least_gain), profiles, "neurons")
    return HeadAllocation(attention=attention, neurons=neurons)


def groups_of(profiles: DeviceBackends, part: Part) -> list[tuple[str, ...]]:
    """The largest groups of backends that the processor has cores for; one of each can compute the whole part."""
    timings, total = _timings(profiles, part)
    threads = {backend.name: backend.threads for backend in profiles.backends}
    # Nobody was measured with all of a part of which there is 0: it is not split.
    measured = tuple(name for name, found in timings.items() if found and total)
    if not profiles.cores or sum(threads[name] for name in measured) <= profiles.cores:
        return [measured] if measured else []
    groups = [
        group
        for size in range(1, len(measured) + 1)
        for group in combinations(measured, size)
        if size == 1 or sum(threads[name] for name in group) <= profiles.cores
    ]
    largest = [group for group in groups if not any(set(group) < set(other) for other in groups)]
    return [group for group in largest if any(timings[name][-1].count == total for name in group)]


def allocate_among(
    profiles: DeviceBackends,
    part: Part,
    group: Sequence[str],
    slowed: Mapping[str, float],
    *,
    least_gain: float = LEAST_GAIN,
) -> PartAllocation:
    """The fastest allocation of a part to some of the backends; for `slowed` and `least_gain` see `allocate_part`."""
    timings, total = _timings(profiles, part)
    own = {name: found for name, found in timings.items() if name in group}
    step = None if part == "attention" else _neuron_step(total)
    dealing_s = profiles.dealing_s.get(part, 0.0)
    return allocate_part(own, total, step=step, least_gain=least_gain, slowed=slowed, dealing_s=dealing_s)


def _best_group(profiles: DeviceBackends, part: Part, least_gain: float) -> PartAllocation | None:
    """The fastest allocation of all groups; each backend alone is always one. None if the part cannot be split."""
    timings, total = _timings(profiles, part)
    groups = groups_of(profiles, part)
    if not groups:
        return None
    tried = {one.backends: one.slowed for one in profiles.together if one.part == part}
    found = [
        allocate_among(profiles, part, group, tried.get(group, {}), least_gain=least_gain)
        for group in [group for group in groups if group in tried] or groups
    ]
    best = min(found, key=lambda allocation: allocation.predicted_s)
    alone = min(
        (name for name, of in timings.items() if of and of[-1].count == total),
        key=lambda name: timings[name][-1].seconds,
    )
    alone_s = timings[alone][-1].seconds
    if alone_s < best.predicted_s * (1 + least_gain) and [share.backend for share in best.shares] != [alone]:
        best = allocate_among(profiles, part, (alone,), {}, least_gain=least_gain)
    chosen = _names(best)
    reasons = best.left_out | {
        name: _why_not_chosen(name, best, found, profiles) if of else "it was not measured with this part"
        for name, of in timings.items()
        if name not in best.left_out and name not in chosen
    }
    return msgspec.structs.replace(best, best_single=alone, best_single_s=alone_s, left_out=reasons)


def _why_not_chosen(name: str, best: PartAllocation, others: Sequence[PartAllocation], profiles: DeviceBackends) -> str:
    """Why a backend has no share that is not in the group that was chosen."""
    threads = {backend.name: backend.threads for backend in profiles.backends}
    busy = [share.backend for share in best.shares]
    if threads[name] and threads[name] + sum(threads[one] for one in busy) > profiles.cores > 0:
        uses = "use" if len(busy) > 1 else "uses"
        return f"the processor has {counted(profiles.cores, 'core')}, which {' and '.join(busy)} {uses}"
    ordered = sorted(others, key=lambda allocation: allocation.predicted_s)
    beside = next((one for one in ordered if name in _names(one)), None)
    if beside is not None:
        return f"{' and '.join(_names(beside))} take {format_seconds(beside.predicted_s)}"
    without = next((one for one in ordered if name in one.left_out), None)
    return "others promised to be faster" if without is None else without.left_out[name]


def _names(allocation: PartAllocation) -> list[str]:
    return [share.backend for share in allocation.shares]


def _timings(profiles: DeviceBackends, part: Part) -> tuple[dict[str, tuple[ShareTiming, ...]], int]:
    """Each backend's, and the part's KV groups or neurons."""
    if part == "attention":
        return {backend.name: backend.attention for backend in profiles.backends}, profiles.groups
    return {backend.name: backend.neurons for backend in profiles.backends}, profiles.neurons


def allocate_part(
    timings: Mapping[str, Sequence[ShareTiming]],
    total: int,
    *,
    step: int | None = None,
    least_gain: float = LEAST_GAIN,
    slowed: Mapping[str, float] = MappingProxyType({}),
    dealing_s: float = 0.0,
) -> PartAllocation:
    """The allocation whose slowest share is fastest, without backends that are not worth it.

    Exact, and never slower than the fastest backend alone. For a time T every backend has a set of counts that it
    computes within T; T is feasible if one count of each (or 0) add up to `total`. The least feasible T is found by
    bisection over all measured times, which it is one of. Timings need not rise with the count. At that T the fastest
    backends get the most they can, the slowest the rest.

    Args:
        timings: By backend; at least one of them for the whole part.
        total: KV groups or neurons of a layer.
        step: None: a backend may compute exactly the counts that were measured. Else counts are multiples of it, with
            seconds between measured ones interpolated.
        least_gain: A backend stays only if the part would take at least this much longer without it (0.03: 3 %).
        slowed: How many times as long as alone a backend takes beside the others (1 if it is not here).
        dealing_s: What shares of several backends cost beside them.
    """
    costs = [
        share_costs(name, of_backend, total, step, slowed.get(name, 1.0))
        for name, of_backend in timings.items()
        if of_backend
    ]
    best = min(costs, key=lambda cost: cost.alone_s)
    assert not math.isinf(best.alone_s), f"no backend was measured with all {total}"
    kept, left_out = _worth_it(costs, total, least_gain, dealing_s)
    seconds, counts = _solve(kept, total, dealing_s)
    if best.alone_s < seconds * (1 + least_gain) and kept != [best]:
        left_out |= {cost.name: _why_dropped(seconds, best.alone_s, least_gain) for cost in kept if cost is not best}
        left_out.pop(best.name, None)
        kept, seconds, counts = [best], best.alone_s, {best.name: total}
    left_out |= {name: "it was not measured with this part" for name, found in timings.items() if not found}
    return PartAllocation(
        shares=tuple(_share(cost, counts[cost.name]) for cost in kept),
        predicted_s=seconds,
        best_single_s=best.alone_s,
        best_single=best.name,
        left_out={name: left_out[name] for name in timings if name in left_out},
    )


def _neuron_step(neurons: int) -> int:
    return next((step for step in _NEURON_STEPS if neurons % step == 0 and neurons // step >= _LEAST_STEPS), 1)


def _noted(allocation: PartAllocation | None, profiles: DeviceBackends, part: Part) -> PartAllocation | None:
    """With what was noted when a backend was measured as a reason of its own."""
    if allocation is None:
        return None
    notes = {backend.name: backend.notes[part] for backend in profiles.backends if part in backend.notes}
    reasons = {
        name: f"{reason} ({notes[name]})" if name in notes else reason for name, reason in allocation.left_out.items()
    }
    return msgspec.structs.replace(allocation, left_out=reasons)


def _worth_it(
    costs: Sequence[ShareCosts], total: int, least_gain: float, dealing_s: float
) -> tuple[list[ShareCosts], dict[str, str]]:
    """The backends without which the part takes notably longer, and why each of the others is left out."""
    kept = list(costs)
    left_out: dict[str, str] = {}
    while True:
        seconds, counts = _solve(kept, total, dealing_s)
        shared_s = fastest_time(kept, total) + dealing_s
        left_out |= {cost.name: _why_idle(cost, seconds, shared_s) for cost in kept if not counts[cost.name]}
        kept = [cost for cost in kept if counts[cost.name]]
        without = {
            cost.name: _solve([other for other in kept if other is not cost], total, dealing_s)[0] for cost in kept
        }
        # Of equals the last goes: the first is what is named first, usually torch.
        weakest = min(reversed(kept), key=lambda cost: without[cost.name])
        if without[weakest.name] >= seconds * (1 + least_gain):
            return kept, left_out
        left_out[weakest.name] = _why_dropped(seconds, without[weakest.name], least_gain)
        kept.remove(weakest)


def _solve(costs: Sequence[ShareCosts], total: int, dealing_s: float) -> tuple[float, dict[str, int]]:
    """The least seconds, and who has how much then: one backend all, or several a share, which must be dealt out."""
    nothing = {cost.name: 0 for cost in costs}
    shared_s = fastest_time(costs, total)
    single = min(costs, key=lambda cost: cost.alone_s, default=None)
    if single is not None and single.alone_s <= shared_s + dealing_s:
        return single.alone_s, nothing | {single.name: total}
    return shared_s + dealing_s, nothing if math.isinf(shared_s) else deal(costs, total, shared_s)


def _share(cost: ShareCosts, count: int) -> PartShare:
    return PartShare(
        backend=cost.name,
        count=count,
        strategy=cost.strategies.get(count, "fused"),
        predicted_s=cost.seconds.get(count, cost.alone_s),
    )


def _why_idle(cost: ShareCosts, seconds: float, shared_s: float) -> str:
    least = min(cost.seconds.values(), default=cost.alone_s)
    if least > seconds:
        return f"its smallest share takes {format_seconds(least)}, the others all of it {format_seconds(seconds)}"
    if seconds < shared_s < math.inf:
        return f"with it {format_seconds(shared_s)}, without it {format_seconds(seconds)}"
    return f"the others take {format_seconds(seconds)} without it, as they would with it"


def _why_dropped(faster: float, slower: float, least_gain: float) -> str:
    if slower <= faster:
        return f"with it {format_seconds(faster)}, without it {format_seconds(slower)}"
    gain = slower / faster - 1
    return (
        f"with it {format_seconds(faster)}, without it {format_seconds(slower)}: it gains {gain:.1%}, "
        f"less than {least_gain:.0%}"
    )
