"""How many heads and neurons each backend of a device gets, so that all finish together (METHODS 1.3)."""

from collections.abc import Mapping, Sequence
from itertools import combinations

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

    They run one after the other, so that each is allocated by itself. Backends were measured one at a time; on the
    processor their seconds hold together only while all their threads have cores. So at most as many are chosen.

    Args:
        profiles: The measured backends; summing and dealing out follow their order.
        least_gain: See `allocate_part`.
    """
    attention = neurons = None
    if profiles.groups:
        timings = {backend.name: backend.attention for backend in profiles.backends}
        attention = _noted(_on_cores(timings, profiles, profiles.groups, None, least_gain), profiles, "attention")
    if profiles.neurons:
        timings = {backend.name: backend.neurons for backend in profiles.backends}
        step = _neuron_step(profiles.neurons)
        neurons = _noted(_on_cores(timings, profiles, profiles.neurons, step, least_gain), profiles, "neurons")
    return HeadAllocation(attention=attention, neurons=neurons)


def _on_cores(
    timings: Mapping[str, Sequence[ShareTiming]],
    profiles: DeviceBackends,
    total: int,
    step: int | None,
    least_gain: float,
) -> PartAllocation:
    """The fastest allocation over backends that the processor has cores for; each alone is always one."""
    threads = {backend.name: backend.threads for backend in profiles.backends}
    measured = [name for name, found in timings.items() if found]
    if not profiles.cores or sum(threads[name] for name in measured) <= profiles.cores:
        return allocate_part(timings, total, step=step, least_gain=least_gain)
    groups = [
        group
        for size in range(1, len(measured) + 1)
        for group in combinations(measured, size)
        if size == 1 or sum(threads[name] for name in group) <= profiles.cores
    ]
    largest = [set(group) for group in groups if not any(set(group) < set(other) for other in groups)]
    able = [group for group in largest if any(timings[name][-1].count == total for name in group)]
    best = min(
        (
            allocate_part({n: t for n, t in timings.items() if n in group}, total, step=step, least_gain=least_gain)
            for group in able
        ),
        key=lambda allocation: allocation.predicted_s,
    )
    alone = min(
        (name for name in measured if timings[name][-1].count == total), key=lambda name: timings[name][-1].seconds
    )
    busy = " and ".join(share.backend for share in best.shares)
    reasons = best.left_out | {
        name: f"the processor has {counted(profiles.cores, 'core')}, which {busy} use"
        if found
        else "it was not measured with this part"
        for name, found in timings.items()
        if name not in best.left_out and all(share.backend != name for share in best.shares)
    }
    return msgspec.structs.replace(best, best_single=alone, best_single_s=timings[alone][-1].seconds, left_out=reasons)


def allocate_part(
    timings: Mapping[str, Sequence[ShareTiming]], total: int, *, step: int | None = None, least_gain: float = LEAST_GAIN
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
    """
    costs = [share_costs(name, of_backend, total, step) for name, of_backend in timings.items() if of_backend]
    whole = [cost for cost in costs if total in cost.seconds]
    assert whole, f"no backend was measured with all {total}"
    best = min(whole, key=lambda cost: cost.seconds[total])
    alone_s = best.seconds[total]
    kept, left_out = _worth_it(costs, total, least_gain)
    seconds, counts = _solve(kept, total)
    if alone_s < seconds * (1 + least_gain):
        left_out |= {cost.name: _why_dropped(seconds, alone_s, least_gain) for cost in kept if cost is not best}
        left_out.pop(best.name, None)
        kept, seconds, counts = [best], alone_s, {best.name: total}
    left_out |= {name: "it was not measured with this part" for name, found in timings.items() if not found}
    return PartAllocation(
        shares=tuple(_share(cost, counts[cost.name]) for cost in kept),
        predicted_s=seconds,
        best_single_s=alone_s,
        best_single=best.name,
        left_out={name: left_out[name] for name in timings if name in left_out},
    )


def _neuron_step(neurons: int) -> int:
    return next((step for step in _NEURON_STEPS if neurons % step == 0 and neurons // step >= _LEAST_STEPS), 1)


def _noted(allocation: PartAllocation, profiles: DeviceBackends, part: Part) -> PartAllocation:
    """With what was noted when a backend was measured as a reason of its own."""
    notes = {backend.name: backend.notes[part] for backend in profiles.backends if part in backend.notes}
    reasons = {
        name: f"{reason} ({notes[name]})" if name in notes else reason for name, reason in allocation.left_out.items()
    }
    return msgspec.structs.replace(allocation, left_out=reasons)


def _worth_it(costs: Sequence[ShareCosts], total: int, least_gain: float) -> tuple[list[ShareCosts], dict[str, str]]:
    """The backends without which the part takes notably longer, and why each of the others is left out."""
    kept = list(costs)
    left_out: dict[str, str] = {}
    while True:
        seconds, counts = _solve(kept, total)
        left_out |= {cost.name: _why_idle(cost, seconds) for cost in kept if not counts[cost.name]}
        kept = [cost for cost in kept if counts[cost.name]]
        without = {cost.name: fastest_time([other for other in kept if other is not cost], total) for cost in kept}
        # Of equals the last goes: the first is what is named first, usually torch.
        weakest = min(reversed(kept), key=lambda cost: without[cost.name])
        if without[weakest.name] >= seconds * (1 + least_gain):
            return kept, left_out
        left_out[weakest.name] = _why_dropped(seconds, without[weakest.name], least_gain)
        kept.remove(weakest)


def _solve(costs: Sequence[ShareCosts], total: int) -> tuple[float, dict[str, int]]:
    seconds = fastest_time(costs, total)
    return seconds, deal(costs, total, seconds)


def _share(cost: ShareCosts, count: int) -> PartShare:
    return PartShare(
        backend=cost.name,
        count=count,
        strategy=cost.strategies.get(count, "fused"),
        predicted_s=cost.seconds[count],
    )


def _why_idle(cost: ShareCosts, seconds: float) -> str:
    least = min(cost.seconds.values())
    if least > seconds:
        return f"its smallest share takes {format_seconds(least)}, the others all of it {format_seconds(seconds)}"
    return f"the others take {format_seconds(seconds)} without it, as they would with it"


def _why_dropped(faster: float, slower: float, least_gain: float) -> str:
    gain = slower / faster - 1
    return (
        f"with it {format_seconds(faster)}, without it {format_seconds(slower)}: it gains {gain:.1%}, "
        f"less than {least_gain:.0%}"
    )
