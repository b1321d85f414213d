"""The hottest part of the device, where the system lets anybody read it."""

from collections.abc import Callable
from typing import Protocol

import psutil

from coterie.measure.absent import Absent

_PLAUSIBLE_CELSIUS = (-40.0, 150.0)
"""Sensors that are not wired up say 0 K, -273 or 255."""


class TemperatureSource(Protocol):
    """Something that knows a temperature. `read` takes less than a millisecond."""

    name: str

    def read(self) -> float | None:
        """Degrees Celsius; None if it has nothing to say at the moment."""
        ...


class SystemTemperature:
    """The hottest of all sensors that psutil can read."""

    name = "the hottest sensor"

    def read(self) -> float | None:
        """See `TemperatureSource`."""
        return _hottest()


class BatteryTemperature:
    """The battery's own, where nothing else is known: on a phone it follows the processor's by minutes."""

    name = "the battery's"

    def __init__(self, celsius: Callable[[], float | None]) -> None:
        self._celsius = celsius

    def read(self) -> float | None:
        """See `TemperatureSource`."""
        return self._celsius()


def find_temperature(battery_celsius: Callable[[], float | None] | None = None) -> TemperatureSource | Absent:
    """Sensors of the machine, else the battery's (if there is one that tells), else why there is none."""
    if _hottest() is not None:
        return SystemTemperature()
    if battery_celsius is not None:
        return BatteryTemperature(battery_celsius)
    if not hasattr(psutil, "sensors_temperatures"):
        return Absent(reason="this system lets programs read none")
    return Absent(reason="no sensor is readable")


def _hottest() -> float | None:
    if not hasattr(psutil, "sensors_temperatures"):  # Windows, macOS
        return None
    try:
        chips = psutil.sensors_temperatures()
    except (OSError, RuntimeError, ValueError):  # broken drivers of odd boards
        return None
    low, high = _PLAUSIBLE_CELSIUS
    values = [float(sensor.current) for sensors in chips.values() for sensor in sensors if sensor.current]
    return max((value for value in values if low < value < high), default=None)
