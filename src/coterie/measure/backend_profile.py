"""How fast each compute backend of this device computes shares of a layer: the figures behind an allocation."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from coterie.backends.backend import BackendInfo
from coterie.backends.shares import AttentionShape, NeuronShape, Shape
from coterie.errors import BackendError
from coterie.heads.pool import BackendPool
from coterie.logs import get_logger
from coterie.measure.cached import keep
from coterie.measure.dealing_cost import dealing_seconds
from coterie.measure.share_bench import Progress, ShareBench, part_counts, part_of
from coterie.measure.share_work import Conditions
from coterie.measure.shares_together import TogetherBench
from coterie.planner.head_drift import without
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends, Part, ShareTiming, Together
from coterie.profiles.cache import ProfileCache, profile_key

_LOG = get_logger(__name__)


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How to measure.

    Attributes:
        budget_s: Seconds for each backend and part; counts that were not reached by then are left out. As many for each
            part side by side.
        again: Measure even if the cache has the answer.
        cache: Where profiles are kept; None for the user's own.
        progress: Told what is measured.
        clock: Seconds.
        rounds_together: Rounds in which backends are timed side by side; 0: they are not, since the clock counts what
            all of them do.
    """

    budget_s: float = 20.0
    again: bool = False
    cache: ProfileCache | None = None
    progress: Progress | None = None
    clock: Callable[[], float] = time.perf_counter
    rounds_together: int = 7


def profile_backends(
    pool: BackendPool,
    attention: AttentionShape | None,
    neurons: NeuronShape | None,
    conditions: Conditions,
    settings: ProfileSettings | None = None,
) -> DeviceBackends:
    """Time shares of a layer on each backend: in its own thread, one backend at a time, nothing beside it.

    A share's seconds are the median of forward, backward and all that is sent for them, weights included if they are
    trained. All backends and counts are gone through in several rounds: what else the machine does meanwhile then slows
    all of them alike, and not the backend that happened to be measured in that minute. Each count of KV groups is
    measured in one computation and as that many computations of one group. A backend that needs more than 8 times the
    fastest's seconds for the smallest share, and more than half of what the fastest needs for the whole part, is
    measured no further, and its profile says so. What dealing a part out costs is timed too (`dealing_cost`). Then
    those that would share a part are timed side by side (`shares_together`).

    Args:
        pool: The backends.
        attention: A whole layer's attention; None if it cannot be split.
        neurons: A whole layer's feed-forward part; None if it cannot be split.
        conditions: The run's shapes and what it needs.
        settings: How to measure; None: as usual.
    """
    settings = settings or ProfileSettings()
    store = settings.cache or ProfileCache()
    key = backends_key(pool.infos, attention, neurons, conditions, together=settings.rounds_together > 0)
    kept = None if settings.again else store.read(key, DeviceBackends)
    if kept is not None:
        return kept
    steps = len(pool.infos) * sum(len(part_counts(shape)) for shape in (attention, neurons) if shape is not None)
    bench = ShareBench(pool, conditions, settings.clock, budget_s=settings.budget_s, steps=steps)
    bench.progress = settings.progress or bench.progress
    of_heads = bench.time_part(attention) if attention is not None else {}
    of_neurons = bench.time_part(neurons) if neurons is not None else {}
    found = DeviceBackends(
        key=key,
        groups=attention.groups if attention is not None and _whole(of_heads, attention.groups) else 0,
        neurons=neurons.neurons if neurons is not None and _whole(of_neurons, neurons.neurons) else 0,
        rows=conditions.rows,
        tokens=conditions.tokens,
        backends=tuple(
            BackendProfile(
                name=info.name,
                device=info.device,
                attention=of_heads.get(info.name, ()),
                neurons=of_neurons.get(info.name, ()),
                notes=bench.notes.get(info.name, {}),
                threads=info.threads,
            )
            for info in pool.infos
        ),
        cores=_usable_cores(),
    )
    shapes = [shape for shape in (attention, neurons) if shape is not None]
    if len(pool.infos) > 1:
        found = msgspec.structs.replace(
            found,
            dealing_s={part_of(shape): dealing_seconds(pool, shape, conditions, settings.clock) for shape in shapes},
        )
    if settings.rounds_together:
        found = _tried_together(bench, found, shapes, settings)
    if not bench.failed:
        # A failure may pass: what another day's driver computes should be asked again.
        keep(store, key, found)
    return found


def _tried_together(
    bench: ShareBench, profile: DeviceBackends, shapes: Sequence[Shape], settings: ProfileSettings
) -> DeviceBackends:
    """With what backends take side by side; one that fails at it is left out."""
    together = TogetherBench(
        bench.pool,
        bench.conditions,
        rounds=settings.rounds_together,
        budget_s=settings.budget_s,
        clock=settings.clock,
        say=lambda what: bench.progress(what, bench.steps, bench.steps),
    )
    for shape in shapes:
        found: tuple[Together, ...] | None = None
        while found is None:
            try:
                found = together.time_part(shape, profile)
            except BackendError as error:
                _LOG.warning("backends side by side: %s", error.message)
                if together.failed.keys() <= bench.failed:
                    return profile  # there is nobody to leave out: what each took alone must do
                bench.failed |= together.failed.keys()
                profile = _left_out(profile, together.failed)
        profile = msgspec.structs.replace(profile, together=(*profile.together, *found))
    return profile


def _left_out(profile: DeviceBackends, failed: Mapping[str, str]) -> DeviceBackends:
    """Nothing of these backends but why."""
    parts: tuple[Part, ...] = ("attention", "neurons")
    backends = [
        msgspec.structs.replace(
            backend,
            attention=(),
            neurons=(),
            notes=dict.fromkeys(parts, f"it failed beside others: {failed[backend.name]}"),
        )
        if backend.name in failed
        else backend
        for backend in profile.backends
    ]
    return msgspec.structs.replace(without(profile, failed), backends=tuple(backends))


def backends_key(
    infos: Sequence[BackendInfo],
    attention: AttentionShape | None,
    neurons: NeuronShape | None,
    conditions: Conditions,
    *,
    together: bool,
) -> str:
    """The key of `profile_backends`' result: shapes, what a run needs, backends with drivers and threads, machine.

    And whether they were timed `together`: where they are not, the clock counts another kind of seconds.
    """
    return profile_key(
        "backends, alone, together and dealt out",
        attention=attention,
        neurons=neurons,
        conditions=conditions,
        together=together,
        backends=tuple(infos),
        machine=(platform.machine(), platform.processor(), platform.node(), _usable_cores()),
    )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _whole(timings: dict[str, tuple[ShareTiming, ...]], total: int) -> bool:
    return any(found and found[-1].count == total for found in timings.values())
