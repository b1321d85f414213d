"""Devices that run down, get hot or run short of memory in mid-run: nothing is lost, and every number stays."""

import random
import re
import sys
from pathlib import Path

import psutil
import pytest

from coterie.coordinator.job import prepare_job
from coterie.coordinator.one_device import largest_difference
from coterie.ids import RunId
from coterie.metrics.records import (
    MembershipRecord,
    PlanRecord,
    RebalanceRecord,
    RecoveryRecord,
    StepRecord,
    SummaryRecord,
)
from coterie.planner.memory import MemorySettings, estimate_memory
from coterie.units import MIB
from coterie.worker.conditions import OwnerConditions
from coterie.worker.settings import WorkerSettings

STEPS = 60
MEMORY_STEPS = 8
LONG_ROWS = 192
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
    assert any(line.startswith("released, the run goes on without this device: its battery") for line in watcher.said)
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


def long_sentences(folder):
    """Rows of about sixty words, so that activations weigh far more than anything else of a tiny model."""
    draw = random.Random(4)
    words = ("anna", "lives", "in", "paris", "near", "the", "old", "office", "of", "acme")
    sentences = [[draw.choice(words) for _ in range(60)] for _ in range(LONG_ROWS)]
    folder.mkdir()
    text = "\n\n".join(
        "\n".join(f"{word}\t{'B-LOC' if word == 'paris' else 'O'}" for word in sentence) for sentence in sentences
    )
    (folder / "train.conll").write_text(text + "\n")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets anybody lower a process's memory")
def test_memory_that_is_taken_from_a_worker_in_mid_run_costs_no_life_and_no_number(
    tmp_path, commands, make_recipe, cluster, run, alone
):
    data = long_sentences(tmp_path / "data")
    started, taken = [], []

    class Mixed(cluster):
        """One worker in a process of its own, the fast one; a slow one beside it."""

        def joinable(self, join_link):
            words = ("--name", "board", "--memory", "1200MiB", "--enforce-memory", "--identity", "memory")
            started.append(commands("worker", join_link, *words, "--threads", 1, "--shard-cache", "off"))
            super().joinable(join_link)

    watcher = Mixed(WorkerSettings(name="slow", speed=0.2))

    def take(record):
        if isinstance(record, StepRecord) and record.step == 3:
            board = next(worker for worker in record.workers if worker.worker == "board")
            limit = between(recipe, watcher.plan, "board")
            take_memory(started[0].process.pid, limit)
            taken.append((board.peak_bytes, limit))

    watcher.on_record = take
    recipe = make_recipe(
        tmp_path / "run",
        **{"data.train": str(data), "batch_rows": 192, "epochs": 20, "max_steps": MEMORY_STEPS, "workers": 2},
        allocator="tight",
        evaluate_every_epoch=False,
        heartbeat_s=0.3,
        heartbeat_timeout_s=60,
        rebalance=False,
        rejoin_s=0,
    )
    result = run(recipe, watcher)
    code, said, error = started[0].end()
    ((peak_bytes, limit),) = taken
    assert peak_bytes > limit, "the stage needed what was taken"
    assert code == 0, (said, error)
    assert "memory is scarce" in said or "memory ran out" in said
    assert [record for record in of(watcher, MembershipRecord) if record.change == "lost"] == []
    assert len(result.losses) == MEMORY_STEPS
    assert largest_difference(result.losses, alone(recipe, MEMORY_STEPS)) < 1e-5


def between(recipe, plan, worker):
    """A limit under which a worker's stage fits if it recomputes, and not as it is planned."""
    place = next(stage for stage in plan.stages if stage.worker == worker)
    again = estimate_memory(
        prepare_job(recipe, RunId("look"), lambda _text: None).model_profile,
        (place.first_unit, place.stop_unit),
        rows=recipe.train.batch_rows // plan.micro_batches,
        in_flight=place.in_flight,
        settings=MemorySettings(schedule="flush", recompute=True, allocator="tight"),
        base_bytes=place.memory.base,
    )
    assert not place.recompute
    assert place.memory.total - again.total > 20 * MIB
    return (place.memory.total + again.total) // 2


def take_memory(pid, limit_bytes):
    """From outside, as `limit_memory` does from inside: no allocation may take the process above the limit."""
    status = Path(f"/proc/{pid}/status").read_text()
    private, resident = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024 for name in ("VmData", "VmRSS"))
    soft = limit_bytes + private - resident
    process = psutil.Process(pid)
    process.rlimit(psutil.RLIMIT_DATA, (soft, process.rlimit(psutil.RLIMIT_DATA)[1]))
