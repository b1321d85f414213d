"""The battery: charge, whether it is plugged in, and what is drawn from it, where the system says so.

A source is found by `find_battery`: the system's own (psutil; on Linux also sysfs, which knows watts), Termux:API on
Android, or a simulated one for tests and emulated devices.
"""

from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from coterie.clock import Clock
from coterie.measure.absent import Absent
from coterie.measure.in_background import InBackground
from coterie.measure.programs import output_of
from coterie.measure.simulated_battery import SIMULATED, SimulatedBattery

TERMUX_PROGRAM = "termux-battery-status"
TERMUX_EVERY_S = 20.0
"""It takes up to a second: the program asks an app, which asks Android."""

SYSFS = Path("/sys/class/power_supply")


class BatteryReading(msgspec.Struct, frozen=True, kw_only=True):
    """What the battery says now.

    Attributes:
        charge: 0 to 1.
        on_power: Plugged in; None if it cannot tell.
        watts: Drawn from it now, 0 or more; None if it cannot tell, or while it is charged.
        celsius: Its own temperature.
    """

    charge: float
    on_power: bool | None = None
    watts: float | None = None
    celsius: float | None = None


class BatterySource(Protocol):
    """Something that knows a battery. `read` takes less than a millisecond."""

    name: str

    def read(self) -> BatteryReading | None:
        """What it says now; None if it has nothing to say at the moment."""
        ...

    def close(self) -> None:
        """Needed no more."""
        ...


class SystemBattery:
    """The battery that the operating system knows."""

    name = "the system's"

    def __init__(self, sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs

    def read(self) -> BatteryReading | None:
        """See `BatterySource`."""
        found = _psutil_battery()
        if found is None:
            return None
        percent, on_power = found
        watts = None if on_power else sysfs_watts(self._sysfs)
        return BatteryReading(charge=_share(percent), on_power=on_power, watts=watts)

    def close(self) -> None:
        """Nothing is held."""


class TermuxBattery:
    """An Android device's battery, by Termux:API."""

    name = "Termux:API"

    def __init__(self) -> None:
        self._background = InBackground(
            lambda: _termux_reading(output_of((TERMUX_PROGRAM,), limit_s=TERMUX_EVERY_S)),
            every_s=TERMUX_EVERY_S,
            name="battery",
        )

    def read(self) -> BatteryReading | None:
        """See `BatterySource`."""
        return self._background.latest()

    def close(self) -> None:
        """End the thread that asks."""
        self._background.close()


class _Simulated:
    """A simulated battery as a source."""

    name = "simulated"

    def __init__(self, battery: SimulatedBattery) -> None:
        self._battery = battery

    def read(self) -> BatteryReading | None:
        """See `BatterySource`."""
        state = self._battery.state()
        if state is None:
            return None
        return BatteryReading(charge=state.charge, on_power=state.on_power, watts=state.watts, celsius=state.celsius)

    def close(self) -> None:
        """Nothing is held."""


def find_battery(wish: str, clock: Clock) -> BatterySource | Absent:
    """The source that the owner wants: `auto`, `none`, or `simulated:…` (see `simulated_battery`).

    Raises:
        UsageError: A simulated battery's text is none.
    """
    if wish.startswith(SIMULATED):
        return _Simulated(SimulatedBattery(wish.removeprefix(SIMULATED), clock))
    if wish == "none":
        return Absent(reason="switched off")
    if _psutil_battery() is not None:
        return SystemBattery()
    status = output_of((TERMUX_PROGRAM,), limit_s=TERMUX_EVERY_S)
    if status is not None and _termux_reading(status) is not None:
        return TermuxBattery()
    termux = "is not installed" if status is None else "says nothing (is the app Termux:API installed?)"
    return Absent(reason=f"the system knows of none, and {TERMUX_PROGRAM} {termux}")


def sysfs_watts(folder: Path) -> float | None:
    """Watts drawn from all batteries that Linux describes in `folder`; None if none of them says so."""
    watts = []
    for battery in sorted(folder.glob("*")):
        if _text(battery / "type") != "Battery" or _text(battery / "scope") == "Device":  # a mouse's, a pen's
            continue
        power = _micro(battery / "power_now")
        current, voltage = _micro(battery / "current_now"), _micro(battery / "voltage_now")
        if power is None and current is not None and voltage is not None:
            power = current * voltage
        if power is not None:
            watts.append(abs(power))
    return sum(watts) if watts else None


def _psutil_battery() -> tuple[float, bool | None] | None:
    """Per cent and whether it is plugged in, by psutil; None where there is no battery or no way to ask."""
    if not hasattr(psutil, "sensors_battery"):  # not on every system
        return None
    try:
        battery = psutil.sensors_battery()
    except (OSError, RuntimeError, NotImplementedError):  # half-described batteries of odd boards
        return None
    return None if battery is None else (float(battery.percent), battery.power_plugged)


def _termux_reading(text: str | None) -> BatteryReading | None:
    """The reading in what `termux-battery-status` prints; its current is in microamperes, negative or not."""
    try:
        told = msgspec.json.decode(text or "", type=_TermuxStatus)
    except msgspec.MsgspecError:
        return None
    on_power = None if told.plugged is None else told.plugged != "UNPLUGGED"
    watts = None
    if not on_power and told.current is not None and told.voltage:
        watts = abs(told.current) * 1e-6 * told.voltage * 1e-3
    return BatteryReading(charge=_share(told.percentage), on_power=on_power, watts=watts, celsius=told.temperature)


class _TermuxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `termux-battery-status` prints, of which not every version says all: millivolts, microamperes."""

    percentage: float
    plugged: str | None = None
    temperature: float | None = None
    current: float | None = None
    voltage: float | None = None


def _share(percent: float) -> float:
    return min(max(percent / 100, 0.0), 1.0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _micro(path: Path) -> float | None:
    """A figure that the kernel writes in millionths."""
    try:
        return int(_text(path)) * 1e-6
    except ValueError:
        return None
