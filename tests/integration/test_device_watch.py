"""Devices that run down, get hot or run short of memory in mid-run: nothing is lost, and every number stays."""

import pytest

from coterie.coordinator.one_device import largest_difference
from coterie.metrics.records import (
    MembershipRecord,
    PlanRecord,
    RebalanceRecord,
    RecoveryRecord,
    StepRecord,
    SummaryRecord,
)
from coterie.worker.conditions import OwnerConditions
from coterie.worker.settings import WorkerSettings

STEPS = 60
NAMES = ("device-a", "device-b", "device-c")
RESERVE = 0.86


def of(watcher, kind):
    return [record for record in watcher.records if isinstance(record, kind)]


@pytest.fixture
def batteries(tmp_path):
    """A simulated battery for each device, plugged in until a test says otherwise."""
    files = {name: tmp_path / f"battery-{name}" for name in NAMES}
    for file in files.values():
        file.write_text("90%,plugged,5W")
    return files


def test_a_battery_that_would_not_last_has_its_layers_moved_before_and_leaves_in_order(
    tmp_path, make_recipe, cluster, run, alone, batteries
):
    watcher = cluster(
        *(
            WorkerSettings(
                name=name,
                battery=f"simulated:file:{batteries[name]}",
                terms=OwnerConditions(min_battery=RESERVE),
                speed=0.2,  # the run must last for the second or two in which a battery's rate shows
            )
            for name in NAMES
        )
    )
    unplugged = []

    def unplug_the_middle(record):
        if isinstance(record, StepRecord) and record.step == 2:
            unplugged.append(record.workers[1].worker)
            batteries[unplugged[0]].write_text("90%,-2%/s,5W")  # empty in 45 s, at its owner's limit in 2

    watcher.on_record = unplug_the_middle
    recipe = make_recipe(
        tmp_path / "run",
        epochs=20,
        max_steps=STEPS,
        rebalance=False,
        heartbeat_s=0.2,
        rejoin_s=0,
        evaluate_every_epoch=False,
    )
    result = run(recipe, watcher)
    (middle,) = unplugged
    (left,) = of(watcher, MembershipRecord)
    assert (left.worker, left.change) == (middle, "left")
    (moved,) = of(watcher, RebalanceRecord)
    assert moved.cause == "battery"
    assert middle in moved.reason
    assert of(watcher, RecoveryRecord) == []
    assert watcher.failures == {}
    assert middle not in [stage.worker for stage in of(watcher, PlanRecord)[-1].stages]
    energy = {record.worker: record for record in of(watcher, SummaryRecord)[0].energy}
    assert 0 < energy[middle].battery < 0.9  # it was not empty when it was heard of last
    assert energy[middle].joules > 0
    assert "simulated" in energy[middle].source
    assert len(result.losses) == STEPS
    assert largest_difference(result.losses, alone(recipe, STEPS)) < 1e-5
