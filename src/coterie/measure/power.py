"""Energy: joules since the worker joined, measured where something measures, else by a model that says so.

Three ways, told apart by their label: `rapl`, the processor's own counters (the whole package, other programs
included); `battery`, what the battery says is drawn, over time (the whole device); `model`, stated watts times the
seconds that the worker computed (nothing is measured). What a simulated battery tells is labelled `simulated`. A device
that is plugged in during a run goes from battery to model, and its sum is then labelled with both.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import psutil

from coterie.measure.absent import Absent
from coterie.measure.battery import BatteryReading
from coterie.profiles.power import PowerModel

PowerLabel = Literal["rapl", "battery", "simulated", "model"]

POWERCAP = Path("/sys/class/powercap")

_LONGEST_GAP_S = 600.0
"""A device that has slept longer than this drew something else meanwhile: the gap counts nothing."""


class EnergyReading(msgspec.Struct, frozen=True, kw_only=True):
    """Energy so far, power now.

    Attributes:
        source: Labels of all sources that the joules are from, joined by `+`.
    """

    joules: float
    watts: float | None
    source: str


class EnergyCounter(Protocol):
    """Joules between two calls. `step` takes less than a millisecond."""

    label: PowerLabel

    def step(self, seconds: float) -> float | None:
        """Joules since the last call, `seconds` ago; None if it cannot tell this time."""
        ...


class RaplCounter:
    """The counters of Intel's and AMD's processors, which most systems let only root read."""

    label: PowerLabel = "rapl"

    def __init__(self, packages: tuple[Path, ...]) -> None:
        self._packages = packages
        self._last = {package: _micro(package / "energy_uj") for package in packages}

    def step(self, seconds: float) -> float | None:  # noqa: ARG002 - the counters need no time
        """See `EnergyCounter`; a counter that has begun anew is followed over its end."""
        total = 0.0
        for package in self._packages:
            now, last = _micro(package / "energy_uj"), self._last[package]
            self._last[package] = now
            if now is None or last is None:
                return None
            span = _micro(package / "max_energy_range_uj") or 0.0
            total += now - last if now >= last else now - last + span
        return total


class BatteryCounter:
    """What the battery says is drawn, times the time; nothing while it is charged."""

    def __init__(self, read: Callable[[], BatteryReading | None], label: PowerLabel = "battery") -> None:
        self.label: PowerLabel = label
        self._read = read

    def step(self, seconds: float) -> float | None:
        """See `EnergyCounter`."""
        reading = self._read()
        if reading is None or reading.on_power or reading.watts is None:
            return None
        return reading.watts * seconds


class ModelCounter:
    """Stated watts times the seconds of the processor that this process took: an assumption, not a measurement."""

    label: PowerLabel = "model"

    def __init__(self, model: PowerModel, threads: int, cpu_s: Callable[[], float] | None = None) -> None:
        self._model = model
        self._threads = threads
        self._cpu_s = cpu_s or process_cpu_s
        self._last_s = self._cpu_s()

    def step(self, seconds: float) -> float | None:
        """See `EnergyCounter`."""
        now_s = self._cpu_s()
        busy_s = min((now_s - self._last_s) / self._threads, seconds)
        self._last_s = now_s
        return self._model.energy_j(compute_s=busy_s, network_s=0.0)


class EnergyMeter:
    """Adds up what the first of `counters` that can tell says, at each call of `read`."""

    def __init__(self, counters: tuple[EnergyCounter, ...], now_s: float) -> None:
        self._counters = counters
        self._last_s = now_s
        self._joules = 0.0
        self._used: dict[str, None] = {}

    def read(self, now_s: float) -> EnergyReading:
        """Energy up to now; all counters are stepped, so that none counts the same time twice."""
        seconds, self._last_s = now_s - self._last_s, now_s
        told = [(counter.label, counter.step(seconds)) for counter in self._counters]
        watts = None
        if 0 < seconds <= _LONGEST_GAP_S:
            for label, joules in told:
                if joules is not None:
                    self._used[label] = None
                    self._joules += joules
                    watts = joules / seconds
                    break
        return EnergyReading(joules=self._joules, watts=watts, source="+".join(self._used))


def find_rapl(folder: Path | None = None) -> RaplCounter | Absent:
    """The packages' counters (not their parts', which are in them), if they are there and may be read."""
    folder = folder or POWERCAP
    packages = tuple(path for path in sorted(folder.glob("*-rapl:*")) if path.name.count(":") == 1)
    if not packages:
        return Absent(reason=f"no counters under {folder}")
    if any(_micro(package / "energy_uj") is None for package in packages):
        return Absent(reason=f"the counters under {folder} may be read by root only")
    return RaplCounter(packages)


def process_cpu_s() -> float:
    """Processor seconds of this process so far, all threads."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _micro(path: Path) -> float | None:
    try:
        return int(path.read_text()) * 1e-6
    except (OSError, ValueError):
        return None
