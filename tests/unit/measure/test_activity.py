"""Whether the owner works: when the device was last touched, and what other programs compute."""

import os
import sys
import time
from pathlib import Path

import pytest

from coterie.clock import FakeClock, SystemClock
from coterie.measure.activity import (
    Activity,
    ActivityReading,
    LeastIdle,
    TerminalIdle,
    find_idle_time,
    mac_idle_s,
    x11_idle_s,
)


class Idle:
    name = "test"

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def idle_s(self) -> float | None:
        return self.seconds


@pytest.mark.skipif(sys.platform == "win32", reason="terminals note no times there")
def test_a_terminal_is_idle_since_it_was_last_typed_into(tmp_path: Path) -> None:
    old, new, now = tmp_path / "pts-0", tmp_path / "pts-1", time.time()
    for terminal, age_s in ((old, 5000), (new, 300)):
        terminal.touch()
        os.utime(terminal, (now - age_s, now))
    found = TerminalIdle(lambda: [str(old), str(new), str(tmp_path / "gone")]).idle_s()
    assert found == pytest.approx(300, abs=30)
    assert TerminalIdle(list).idle_s() is None


def test_the_least_idle_of_several_counts_and_those_that_cannot_tell_do_not() -> None:
    assert LeastIdle((Idle(None), Idle(40.0), Idle(3.0))).idle_s() == 3.0
    assert LeastIdle((Idle(None),)).idle_s() is None


def test_what_programs_print_is_understood_or_nothing() -> None:
    assert mac_idle_s('  | | "HIDIdleTime" = 2500000000\n') == 2.5
    assert mac_idle_s("nothing") is None
    assert x11_idle_s("1500\n") == 1.5
    assert x11_idle_s("cannot open display") is None


def test_what_this_process_computes_is_not_the_owners_work() -> None:
    clock = FakeClock()
    times = {"busy": 100.0, "own": 10.0}
    activity = Activity(Idle(7.0), clock=clock, times=lambda: (times["busy"], times["own"]))
    clock.advance(2.0)
    times |= {"busy": 103.0, "own": 12.0}
    assert activity.read() == ActivityReading(others_cores=0.5, idle_s=7.0)
    clock.advance(2.0)
    times |= {"busy": 104.0, "own": 14.0}  # counters of different grain: less than nothing is nothing
    assert activity.read() == ActivityReading(others_cores=0.0, idle_s=7.0)


def test_the_machines_own_counters_can_be_read() -> None:
    reading = Activity(None, clock=SystemClock()).read()
    assert reading.others_cores >= 0
    assert reading.idle_s is None


def test_every_system_has_some_way_to_ask_without_privileges() -> None:
    idle = find_idle_time()
    assert idle is not None
    assert idle.idle_s() is None or idle.idle_s() >= 0
