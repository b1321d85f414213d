"""What a device says of itself in every heartbeat."""

from pathlib import Path

import msgspec
import psutil
import pytest

from coterie.clock import FakeClock
from coterie.cluster.fault_messages import Vitals
from coterie.cluster.messages import Heartbeat, pack, unpack
from coterie.errors import UsageError
from coterie.units import MIB
from coterie.worker.conditions import OwnerConditions, Seen
from coterie.worker.settings import WorkerSettings
from coterie.worker.vitals import OwnVitals


@pytest.fixture(autouse=True)
def _no_sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine that runs these tests."""
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)


def vitals_of(clock: FakeClock, **settings: object) -> OwnVitals:
    return OwnVitals(WorkerSettings(name="board", **settings), clock)


def test_everything_a_simulated_device_knows_goes_into_a_heartbeat(tmp_path: Path) -> None:
    clock, file = FakeClock(), tmp_path / "memory"
    file.write_text("3MiB")
    own = vitals_of(
        clock,
        battery="simulated:50%,-1%/s,6W,40C",
        memory_file=file,
        terms=OwnerConditions(min_battery=0.3, only_on_power=True),
    )
    assert own.latest is None
    own.read()
    clock.advance(10.0)
    seen, memory = own.read()
    assert (memory.limit_bytes, str(file) in memory.why) == (3 * MIB, True)
    assert seen == Seen(battery=pytest.approx(0.4), on_power=False, celsius=40.0)
    assert own.latest == Vitals(
        battery=pytest.approx(0.4),
        on_power=False,
        watts=6.0,
        joules=60.0,
        watts_source="simulated",
        celsius=40.0,
        available_bytes=0,
        reserve=0.3,
        only_on_power=True,
    )
    message = Heartbeat(rss_bytes=1, vitals=own.latest)
    assert unpack(pack(message)) == message


def test_a_device_that_knows_nothing_says_so_and_assumes_its_energy() -> None:
    clock = FakeClock()
    own = vitals_of(clock, battery="none", watts=12.0)
    clock.advance(5.0)
    own.read()
    latest = own.latest
    assert latest is not None
    assert (latest.battery, latest.on_power, latest.celsius) == (None, None, None)
    assert latest.watts_source in ("model", "rapl")
    assert latest.joules is not None
    assert latest.joules >= 0
    assert latest.available_bytes is not None
    assert latest.available_bytes > 0


def test_the_owners_work_is_looked_for_only_where_the_worker_yields() -> None:
    assert vitals_of(FakeClock(), battery="none")._activity is None
    assert vitals_of(FakeClock(), battery="none", terms=OwnerConditions(yields_to=0.2))._activity is not None


def test_a_battery_that_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(UsageError, match="lemon"):
        vitals_of(FakeClock(), battery="simulated:lemon")


def test_vitals_of_an_older_worker_have_a_reserve() -> None:
    assert msgspec.convert({}, Vitals).reserve == 0.2
