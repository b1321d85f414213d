"""What is said of a battery: by the system, by Termux:API, by a simulation."""

import os
from pathlib import Path

import psutil
import pytest

from coterie.clock import FakeClock
from coterie.measure import battery
from coterie.measure.absent import Absent
from coterie.measure.battery import BatteryReading, find_battery, sysfs_watts
from coterie.measure.in_background import InBackground

TERMUX = """{
  "health": "GOOD", "percentage": 64, "plugged": "UNPLUGGED", "status": "DISCHARGING",
  "temperature": 31.5, "current": -500000, "voltage": 4000
}"""


class Clocked:
    def __init__(self, text: str) -> None:
        self.clock = FakeClock(100.0)
        found = find_battery(text, self.clock)
        assert not isinstance(found, Absent)
        self.read = found.read


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(text + "\n")


def test_a_simulated_battery_falls_with_the_clock_and_stops_at_empty() -> None:
    simulated = Clocked("simulated:10%,-2%/min,6W,38C")
    assert simulated.read() == BatteryReading(charge=0.1, on_power=False, watts=6.0, celsius=38.0)
    simulated.clock.advance(120)
    reading = simulated.read()
    assert reading is not None
    assert reading.charge == pytest.approx(0.06)
    simulated.clock.advance(1000)
    assert simulated.read() == BatteryReading(charge=0.0, on_power=False, watts=6.0, celsius=38.0)


def test_a_simulated_battery_in_a_file_is_what_the_file_says_now(tmp_path: Path) -> None:
    file = tmp_path / "battery"
    simulated = Clocked(f"simulated:file:{file}")
    assert simulated.read() is None
    file.write_text("80%\n")
    assert simulated.read() == BatteryReading(charge=0.8, on_power=False)
    file.write_text("5%,plugged")
    assert simulated.read() == BatteryReading(charge=0.05, on_power=True)
    file.write_text("50%,-1%/s")
    os.utime(file, (200.0, 90.0))  # ten seconds before the clock's present
    reading = simulated.read()
    assert reading is not None
    assert reading.charge == pytest.approx(0.4)
    file.write_text("5")  # half written
    assert simulated.read() is None


def test_linux_says_what_is_drawn_as_power_or_as_current_and_voltage(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", power_now="7500000")
    supply(tmp_path, "BAT1", type="Battery", current_now="-500000", voltage_now="8000000")
    supply(tmp_path, "AC", type="Mains", power_now="60000000")
    supply(tmp_path, "mouse", type="Battery", scope="Device", power_now="100000")
    assert sysfs_watts(tmp_path) == pytest.approx(7.5 + 4.0)
    assert sysfs_watts(tmp_path / "AC") is None


def test_the_systems_battery_is_found_by_itself_and_draws_nothing_while_plugged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supply(tmp_path, "BAT0", type="Battery", power_now="7500000")
    state = {"plugged": False}
    laptop = type("sbattery", (), {"percent": 40, "power_plugged": property(lambda _: state["plugged"])})
    monkeypatch.setattr(psutil, "sensors_battery", laptop, raising=False)
    assert isinstance(find_battery("auto", FakeClock()), battery.SystemBattery)
    source = battery.SystemBattery(tmp_path)
    assert source.read() == BatteryReading(charge=0.4, on_power=False, watts=7.5)
    state["plugged"] = True
    assert source.read() == BatteryReading(charge=0.4, on_power=True, watts=None)


def test_android_is_asked_by_termux_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    program = tmp_path / "termux-battery-status"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{TERMUX}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    source = find_battery("auto", FakeClock())
    assert isinstance(source, battery.TermuxBattery)
    for _ in range(200):
        if (reading := source.read()) is not None:
            break
        source._background._ending.wait(0.05)
    assert reading == BatteryReading(charge=0.64, on_power=False, watts=2.0, celsius=31.5)
    source.close()


@pytest.mark.parametrize("text", ["", "not json", '{"health": "GOOD"}', '{"percentage": "many"}'])
def test_a_termux_that_says_nothing_useful_is_no_source(text: str) -> None:
    assert battery._termux_reading(text) is None


def test_without_a_battery_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_battery("auto", FakeClock())
    assert isinstance(found, Absent)
    assert "termux-battery-status is not installed" in found.reason
    assert find_battery("none", FakeClock()) == Absent(reason="switched off")


def test_what_is_read_in_the_background_is_kept_until_the_next_time() -> None:
    values = iter([1, 2])
    background: InBackground[int] = InBackground(lambda: next(values), every_s=1000, name="test")
    for _ in range(200):
        if background.latest() is not None:
            break
        background._ending.wait(0.01)
    assert [background.latest(), background.latest()] == [1, 1]
    background.close()
    background._thread.join(60)
    assert not background._thread.is_alive()
