"""The hottest sensor, or why there is none."""

from typing import NamedTuple

import psutil
import pytest

from coterie.measure.absent import Absent
from coterie.measure.temperature import find_temperature


class Sensor(NamedTuple):
    current: float


def sensors(**chips: list[float]) -> dict[str, list[Sensor]]:
    return {name: [Sensor(value) for value in values] for name, values in chips.items()}


def test_the_hottest_plausible_sensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chips = sensors(coretemp=[61.0, 74.5], nvme=[40.0], broken=[255.0, -273.0])
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips, raising=False)
    found = find_temperature()
    assert not isinstance(found, Absent)
    assert found.read() == 74.5


def test_without_sensors_the_battery_tells_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    found = find_temperature(lambda: 33.0)
    assert not isinstance(found, Absent)
    assert (found.name, found.read()) == ("the battery's", 33.0)
    assert find_temperature() == Absent(reason="no sensor is readable")


def test_a_system_that_lets_nobody_read_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    assert find_temperature() == Absent(reason="this system lets programs read none")


def test_a_driver_that_fails_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no such sensor")

    monkeypatch.setattr(psutil, "sensors_temperatures", fail, raising=False)
    assert isinstance(find_temperature(), Absent)
