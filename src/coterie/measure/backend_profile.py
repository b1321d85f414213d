"""How fast each compute backend of this device computes shares of a layer: the figures behind an allocation."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from coterie.backends.backend import Backend, BackendInfo
from coterie.backends.shares import AttentionShape, NeuronShape, Shape
from coterie.errors import BackendError
from coterie.heads.dealing import part_shape
from coterie.heads.pool import BackendPool
from coterie.logs import get_logger
from coterie.measure.cached import keep
from coterie.measure.share_work import Conditions, ShareWork
from coterie.profiles.backend_profile import BackendProfile, DeviceBackends, Part, ShareTiming
from coterie.profiles.cache import ProfileCache, profile_key
from coterie.units import format_seconds

_LOG = get_logger(__name__)

Progress = Callable[[str, int, int], None]
"""Told before each measurement: what is measured, its number from 1, and how many there are."""

_MOST_GROUPS = 16
_HOPELESS = 8
_SAMPLE_BUDGET_S = 0.3
_LEAST_SAMPLES = 3
_MOST_SAMPLES = 9
_WIDTHS = 8
_WIDTH_STEP = 16


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How to measure.

    Attributes:
        budget_s: Seconds for each backend and part; counts that were not reached by then are left out.
        again: Measure even if the cache has the answer.
        cache: Where profiles are kept; None for the user's own.
        progress: Told what is measured.
        clock: Seconds.
    """

    budget_s: float = 20.0
    again: bool = False
    cache: ProfileCache | None = None
    progress: Progress | None = None
    clock: Callable[[], float] = time.perf_counter


def group_counts(groups: int) -> tuple[int, ...]:
    """KV groups to measure: all counts up to 16 groups, else about 16 with 1, all and all but 1 among them."""
    if groups <= _MOST_GROUPS:
        return tuple(range(1, groups + 1))
    evenly = {round(groups * index / _MOST_GROUPS) for index in range(1, _MOST_GROUPS + 1)}
    # An allocation needs counts that add up: each count's complement is measured too.
    return tuple(sorted({1} | evenly | {groups - count for count in {1} | evenly if count < groups}))


def neuron_counts(neurons: int) -> tuple[int, ...]:
    """Feed-forward widths to measure: a sixteenth, and each eighth."""
    parts = [neurons / (2 * _WIDTHS), *(neurons * index / _WIDTHS for index in range(1, _WIDTHS))]
    step = _WIDTH_STEP if neurons >= _WIDTH_STEP * 2 * _WIDTHS else 1
    rounded = {max(round(part / step) * step, 1) for part in parts}
    return tuple(sorted({count for count in rounded if count < neurons} | {neurons}))


def profile_backends(
    pool: BackendPool,
    attention: AttentionShape | None,
    neurons: NeuronShape | None,
    conditions: Conditions,
    settings: ProfileSettings | None = None,
) -> DeviceBackends:
    """Time shares of a layer on each backend: in its own thread, one backend at a time, nothing beside it.

    A share's seconds are the median, after one to warm up, of forward, backward and all that is sent for them, weights
    included if they are trained. Each count of KV groups is measured in one computation and as that many computations
    of one group. A backend that needs more than 8 times the fastest's seconds for the smallest share, and more than
    half of what the fastest needs for the whole part, is measured no further, and its profile says so.

    Args:
        pool: The backends.
        attention: A whole layer's attention; None if it cannot be split.
        neurons: A whole layer's feed-forward part; None if it cannot be split.
        conditions: The run's shapes and what it needs.
        settings: How to measure; None: as usual.
    """
    settings = settings or ProfileSettings()
    store = settings.cache or ProfileCache()
    key = backends_key(pool.infos, attention, neurons, conditions)
    kept = None if settings.again else store.read(key, DeviceBackends)
    if kept is not None:
        return kept
    bench = _Bench(pool, conditions, settings, [shape for shape in (attention, neurons) if shape is not None])
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
    if not bench.failed:
        # A failure may pass: what another day's driver computes should be asked again.
        keep(store, key, found)
    return found


def backends_key(
    infos: Sequence[BackendInfo],
    attention: AttentionShape | None,
    neurons: NeuronShape | None,
    conditions: Conditions,
) -> str:
    """The key of `profile_backends`' result: shapes, what a run needs, backends with drivers and threads, machine."""
    return profile_key(
        "backends",
        attention=attention,
        neurons=neurons,
        conditions=conditions,
        backends=tuple(infos),
        machine=(platform.machine(), platform.processor(), platform.node(), _usable_cores()),
    )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _whole(timings: dict[str, tuple[ShareTiming, ...]], total: int) -> bool:
    return any(found and found[-1].count == total for found in timings.values())


class _Bench:
    """Times counts on backends, and remembers what it did not time.

    Attributes:
        notes: By backend and part, what was not measured and why.
        failed: Names of backends that raised an error.
    """

    def __init__(
        self, pool: BackendPool, conditions: Conditions, settings: ProfileSettings, shapes: Sequence[Shape]
    ) -> None:
        self.notes: dict[str, dict[Part, str]] = {}
        self.failed: set[str] = set()
        self._pool = pool
        self._conditions = conditions
        self._settings = settings
        self._clock = settings.clock
        self._spent_s: dict[str, float] = {}
        self._steps = len(pool.infos) * sum(len(_counts(shape)) for shape in shapes)
        self._step = 0

    def time_part(self, shape: Shape) -> dict[str, tuple[ShareTiming, ...]]:
        """Timings by backend; the smallest count on all of them first, then the whole part, then what is between."""
        part, counts = _part(shape), _counts(shape)
        self._spent_s = {}
        last_step = self._step + len(self._pool.infos) * len(counts)
        for name in self.failed:
            self.notes[name][part] = "it had failed"
        names = [info.name for info in self._pool.infos if info.name not in self.failed]
        timings: dict[str, list[ShareTiming]] = {name: [] for name in names}
        for name in names:
            self._add(timings, name, shape, counts[0])
        order = sorted((name for name in names if timings[name]), key=lambda name: timings[name][0].seconds)
        rest = (counts[-1], *counts[1:-1]) if len(counts) > 1 else ()
        for name in order:
            fastest = timings[order[0]]
            if name != order[0] and fastest and _is_hopeless(timings[name][0], fastest):
                times = timings[name][0].seconds / fastest[0].seconds
                self.notes.setdefault(name, {})[part] = (
                    f"its smallest share is {times:.3g} times as slow as that of {order[0]}; it was measured no further"
                )
            else:
                self._add_rest(timings, name, shape, rest)
        self._step = last_step
        return {name: tuple(sorted(found, key=lambda timing: timing.count)) for name, found in timings.items()}

    def _add_rest(self, timings: dict[str, list[ShareTiming]], name: str, shape: Shape, counts: Sequence[int]) -> None:
        for done, count in enumerate(counts):
            # The whole part is always measured: somebody must be able to compute it alone.
            if done and self._spent_s[name] > self._settings.budget_s:
                self.notes.setdefault(name, {})[_part(shape)] = (
                    f"{format_seconds(self._settings.budget_s)} were enough for {done + 1} of {len(counts) + 1} counts"
                )
                return
            self._add(timings, name, shape, count)
            if name in self.failed:
                return

    def _add(self, timings: dict[str, list[ShareTiming]], name: str, shape: Shape, count: int) -> None:
        self._step += 1
        if self._settings.progress is not None:
            self._settings.progress(f"{name}, {_counted(shape, count)}", self._step, self._steps)
        start_s = self._clock()
        try:
            timing = self._time(name, shape, count)
        except BackendError as error:
            _LOG.warning("%s: %s", name, error.message)
            self.failed.add(name)
            self.notes.setdefault(name, {})[_part(shape)] = f"it failed: {error.message}"
            timings[name] = []
            return
        self._spent_s[name] = self._spent_s.get(name, 0.0) + self._clock() - start_s
        timings[name].append(timing)

    def _time(self, name: str, shape: Shape, count: int) -> ShareTiming:
        fused_s = self._median(name, ShareWork([part_shape(shape, count)], self._conditions))
        each_s = None
        if isinstance(shape, AttentionShape):
            each_s = fused_s
            if count > 1:
                each_s = self._median(name, ShareWork([part_shape(shape, 1)] * count, self._conditions))
        faster_each = each_s is not None and each_s < fused_s
        return ShareTiming(
            count=count,
            seconds=each_s if each_s is not None and faster_each else fused_s,
            strategy="each" if faster_each else "fused",
            fused_s=fused_s,
            each_s=each_s,
        )

    def _median(self, name: str, work: ShareWork) -> float:
        """Median seconds in the backend's own thread, without the time to get there."""

        def measure(backend: Backend) -> float:
            work.once(backend)
            samples: list[float] = []
            while len(samples) < _LEAST_SAMPLES or (len(samples) < _MOST_SAMPLES and sum(samples) < _SAMPLE_BUDGET_S):
                start_s = self._clock()
                work.once(backend)
                samples.append(self._clock() - start_s)
            work.release()
            return statistics.median(samples)

        return self._pool.call(name, measure)


def _is_hopeless(smallest: ShareTiming, fastest: Sequence[ShareTiming]) -> bool:
    whole = max(fastest, key=lambda timing: timing.count)
    # A GPU's fixed costs alone do not condemn it: a large share may cost no more than a small one.
    return smallest.seconds > _HOPELESS * fastest[0].seconds and smallest.seconds > whole.seconds / 2


def _part(shape: Shape) -> Part:
    return "attention" if isinstance(shape, AttentionShape) else "neurons"


def _counts(shape: Shape) -> tuple[int, ...]:
    return group_counts(shape.groups) if isinstance(shape, AttentionShape) else neuron_counts(shape.neurons)


def _counted(shape: Shape, count: int) -> str:
    if isinstance(shape, AttentionShape):
        return f"{count} of {shape.groups} KV groups"
    return f"{count} of {shape.neurons} neurons"
