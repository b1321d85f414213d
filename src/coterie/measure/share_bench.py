"""Times shares of a layer on several backends in alternating rounds, and remembers what it did not time."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from coterie.backends.backend import Backend
from coterie.backends.shares import AttentionShape, Shape
from coterie.errors import BackendError
from coterie.heads.dealing import part_shape
from coterie.heads.pool import BackendPool
from coterie.logs import get_logger
from coterie.measure.share_work import Conditions, ShareWork
from coterie.profiles.backend_profile import Part, ShareTiming
from coterie.units import format_seconds

_LOG = get_logger(__name__)

Progress = Callable[[str, int, int], None]
"""Told before each measurement: what is measured, its number from 1, and how many there are."""

ROUNDS = 3

_HOPELESS = 8
_SAMPLE_BUDGET_S = 0.1
_MOST_SAMPLES = 3
_MOST_GROUPS = 16
_WIDTHS = 8
_WIDTH_STEP = 16


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


def part_counts(shape: Shape) -> tuple[int, ...]:
    """The counts of a part that are measured, rising; the last is the whole part."""
    return group_counts(shape.groups) if isinstance(shape, AttentionShape) else neuron_counts(shape.neurons)


class _Samples:
    """Seconds of one count on one backend."""

    def __init__(self) -> None:
        self.fused: list[float] = []
        self.each: list[float] = []


class ShareBench:
    """One measurement of a device's backends.

    Args:
        pool: The backends, each in its own thread.
        conditions: Of the run.
        clock: Seconds.
        budget_s: Seconds for each backend and part; counts not reached by then are left out.
        steps: How many measurements there are in a round, for the progress bar.

    Attributes:
        pool, conditions: As given.
        steps: How many measurements there are in all rounds.
        notes: By backend and part, what was not measured and why.
        failed: Names of backends that raised an error.
        progress: Told what is measured.
    """

    def __init__(
        self, pool: BackendPool, conditions: Conditions, clock: Callable[[], float], *, budget_s: float, steps: int
    ) -> None:
        self.notes: dict[str, dict[Part, str]] = {}
        self.failed: set[str] = set()
        self.progress: Progress = lambda _what, _step, _of: None
        self.pool = pool
        self.conditions = conditions
        self._clock = clock
        self._budget_s = budget_s
        self.steps = steps * ROUNDS
        self._step = 0
        self._spent_s: dict[str, float] = {}
        self._samples: dict[str, dict[int, _Samples]] = {}

    def time_part(self, shape: Shape) -> dict[str, tuple[ShareTiming, ...]]:
        """Timings by backend, by rising count.

        In the first round the smallest count comes first on all of them, then the whole part, then what is between.
        """
        part, counts = part_of(shape), part_counts(shape)
        last_step = self._step + ROUNDS * len(self.pool.infos) * len(counts)
        for name in self.failed:
            self.notes[name][part] = "it had failed"
        names = [info.name for info in self.pool.infos if info.name not in self.failed]
        self._spent_s = dict.fromkeys(names, 0.0)
        self._samples = {name: {} for name in names}
        self._round(names, shape, counts[:1])
        names = self._hopeful(names, shape)
        self._round(names, shape, counts[1:-1], must_be_within=True)
        for _ in range(ROUNDS - 1):
            for count in counts:
                self._round([name for name in names if count in self._samples[name]], shape, (count,), again=True)
        self._step = last_step
        return {name: _timings(found) for name, found in self._samples.items()}

    def _hopeful(self, names: Sequence[str], shape: Shape) -> list[str]:
        """Measure the whole part on all but those whose smallest share shows that they are of no use."""
        part, counts = part_of(shape), part_counts(shape)
        order = sorted((name for name in names if self._samples[name]), key=self._smallest_s)
        kept: list[str] = []
        for name in order:
            if kept and self._is_hopeless(name, kept[0]):
                times = self._smallest_s(name) / self._smallest_s(kept[0])
                self.notes.setdefault(name, {})[part] = (
                    f"its smallest share is {times:.3g} times as slow as that of {kept[0]}; it was measured no further"
                )
                continue
            # The whole part is always measured: somebody must be able to compute it alone.
            self._round([name], shape, counts[1:][-1:])
            if name not in self.failed:
                kept.append(name)
        return [name for name in names if name in kept]

    def _smallest_s(self, name: str) -> float:
        return _seconds(self._samples[name][min(self._samples[name])])

    def _is_hopeless(self, name: str, fastest: str) -> bool:
        whole_s = _seconds(self._samples[fastest][max(self._samples[fastest])])
        # A GPU's fixed costs alone do not condemn it: a large share may cost no more than a small one.
        return self._smallest_s(name) > max(_HOPELESS * self._smallest_s(fastest), whole_s / 2)

    def _round(
        self,
        names: Sequence[str],
        shape: Shape,
        counts: Sequence[int],
        *,
        must_be_within: bool = False,
        again: bool = False,
    ) -> None:
        """Measure each count on each backend; those whose time is up are left out, `must_be_within` with a note."""
        part, all_counts = part_of(shape), part_counts(shape)
        for count in counts:
            for name in names:
                if name in self.failed:
                    continue
                if (must_be_within or again) and self._spent_s[name] > self._budget_s:
                    if must_be_within:
                        self.notes.setdefault(name, {})[part] = (
                            f"{format_seconds(self._budget_s)} were enough for {len(self._samples[name])} of "
                            f"{len(all_counts)} counts"
                        )
                    continue
                self._add(name, shape, count)

    def _add(self, name: str, shape: Shape, count: int) -> None:
        self._step += 1
        self.progress(f"{name}, {_counted(shape, count)}", self._step, self.steps)
        start_s = self._clock()
        samples = self._samples[name].setdefault(count, _Samples())
        try:
            samples.fused += self._measured(name, ShareWork([part_shape(shape, count)], self.conditions))
            if isinstance(shape, AttentionShape) and count > 1:
                samples.each += self._measured(name, ShareWork([part_shape(shape, 1)] * count, self.conditions))
            elif isinstance(shape, AttentionShape):
                samples.each = samples.fused
        except BackendError as error:
            _LOG.warning("%s: %s", name, error.message)
            self.failed.add(name)
            self.notes.setdefault(name, {})[part_of(shape)] = f"it failed: {error.message}"
            self._samples[name] = {}
        self._spent_s[name] += self._clock() - start_s

    def _measured(self, name: str, work: ShareWork) -> list[float]:
        """Seconds in the backend's own thread, without the time to get there; after one to warm up."""

        def measure(backend: Backend) -> list[float]:
            work.once(backend)
            samples: list[float] = []
            while not samples or (len(samples) < _MOST_SAMPLES and sum(samples) < _SAMPLE_BUDGET_S):
                start_s = self._clock()
                work.once(backend)
                samples.append(self._clock() - start_s)
            work.release()
            return samples

        return self.pool.call(name, measure)


def _seconds(samples: _Samples) -> float:
    return min(statistics.median(found) for found in (samples.fused, samples.each) if found)


def _timings(samples: dict[int, _Samples]) -> tuple[ShareTiming, ...]:
    counts = sorted(samples)
    fused = rising([statistics.median(samples[count].fused) for count in counts])
    has_each = [count for count in counts if samples[count].each]
    each = dict(zip(has_each, rising([statistics.median(samples[count].each) for count in has_each]), strict=True))
    timings = []
    for count, fused_s in zip(counts, fused, strict=True):
        each_s = each.get(count)
        faster_each = each_s is not None and each_s < fused_s
        timings.append(
            ShareTiming(
                count=count,
                seconds=each_s if each_s is not None and faster_each else fused_s,
                strategy="each" if faster_each else "fused",
                fused_s=fused_s,
                each_s=each_s,
            )
        )
    return tuple(timings)


def rising(seconds: Iterable[float]) -> list[float]:
    """The rising figures that are nearest to these, by squares (pool adjacent violators).

    A larger share does not take less time; where measurements say so it is noise, and an allocation that believed the
    luckiest one would be dealt out by it.
    """
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, many), (low, more) = pools[-2:]
            pools[-2:] = [((high * many + low * more) / (many + more), many + more)]
    return [mean for mean, many in pools for _ in range(many)]


def part_of(shape: Shape) -> Part:
    """Of a layer."""
    return "attention" if isinstance(shape, AttentionShape) else "neurons"


def _counted(shape: Shape, count: int) -> str:
    if isinstance(shape, AttentionShape):
        return f"{count} of {shape.groups} KV groups"
    return f"{count} of {shape.neurons} neurons"
