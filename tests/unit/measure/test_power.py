"""Joules: counted by the processor, by the battery, or assumed; and always said which."""

from pathlib import Path

import pytest

from coterie.measure.absent import Absent
from coterie.measure.battery import BatteryReading
from coterie.measure.power import BatteryCounter, EnergyMeter, ModelCounter, RaplCounter, find_rapl, process_cpu_s
from coterie.profiles.power import PowerModel


def package(folder: Path, name: str, joules: float, span: float = 100.0) -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{round(span * 1e6)}\n")
    return folder / name


class CpuTime:
    def __init__(self) -> None:
        self.seconds = 5.0

    def __call__(self) -> float:
        return self.seconds


def test_the_processors_counters_are_summed_over_packages_and_followed_over_their_end(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 90.0)
    package(tmp_path, "intel-rapl:1", 10.0)
    package(tmp_path, "intel-rapl:0:0", 50.0)  # the cores of package 0: in its figure already
    counter = find_rapl(tmp_path)
    assert isinstance(counter, RaplCounter)
    package(tmp_path, "intel-rapl:0", 95.0)
    package(tmp_path, "intel-rapl:1", 12.0)
    assert counter.step(1.0) == pytest.approx(7.0)
    package(tmp_path, "intel-rapl:0", 3.0)
    assert counter.step(1.0) == pytest.approx(8.0)


def test_counters_that_are_absent_or_roots_own_are_absent_with_the_reason(tmp_path: Path) -> None:
    assert find_rapl(tmp_path) == Absent(reason=f"no counters under {tmp_path}")
    (package(tmp_path, "intel-rapl:0", 1.0) / "energy_uj").unlink()
    found = find_rapl(tmp_path)
    assert isinstance(found, Absent)
    assert "root" in found.reason


def test_the_model_counts_the_seconds_that_this_process_computed_and_no_more_than_passed() -> None:
    cpu_s = CpuTime()
    counter = ModelCounter(PowerModel(compute_w=12.0), 2, cpu_s)
    cpu_s.seconds += 4.0
    assert counter.step(10.0) == pytest.approx(12.0 * 2.0)
    cpu_s.seconds += 40.0
    assert counter.step(10.0) == pytest.approx(12.0 * 10.0)


def test_joules_are_measured_while_the_battery_says_what_is_drawn_and_assumed_while_it_is_charged() -> None:
    cpu_s = CpuTime()
    battery = {"now": BatteryReading(charge=0.5, on_power=False, watts=5.0)}
    meter = EnergyMeter(
        (BatteryCounter(lambda: battery["now"]), ModelCounter(PowerModel(compute_w=10.0), 1, cpu_s)), now_s=0.0
    )
    cpu_s.seconds += 1.0
    on_battery = meter.read(2.0)
    assert (on_battery.joules, on_battery.watts, on_battery.source) == (10.0, 5.0, "battery")
    battery["now"] = BatteryReading(charge=0.5, on_power=True)
    cpu_s.seconds += 1.0  # only what passed since the last call may count: the second before is the battery's
    charged = meter.read(4.0)
    assert (charged.joules, charged.watts, charged.source) == (20.0, 5.0, "battery+model")


def test_a_device_that_slept_draws_nothing_in_the_gap() -> None:
    battery = BatteryReading(charge=0.5, on_power=False, watts=5.0)
    meter = EnergyMeter((BatteryCounter(lambda: battery),), now_s=0.0)
    assert meter.read(100_000.0).joules == 0.0
    assert meter.read(100_001.0).joules == 5.0


def test_this_process_has_taken_processor_time() -> None:
    before = process_cpu_s()
    sum(range(2_000_000))
    assert process_cpu_s() >= before > 0
