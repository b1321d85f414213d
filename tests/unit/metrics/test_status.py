"""A run's status out of its records, of one that goes on and of one that has ended."""

import pytest

from coterie.metrics.fault_records import MembershipRecord, RebalanceRecord, RecoveryRecord
from coterie.metrics.records import FaultRecord, MemoryRecord, PlanRecord, StageMemory, StageRecord, StartRecord
from coterie.metrics.status import StatusBook

MIB = 1 << 20
START = StartRecord(run="r", package_version="0", model="m", total_steps=60, steps_per_epoch=30)
MEMORY = StageMemory(
    base=1, weights=1, gradients=1, optimizer=1, weight_versions=0, activations=1, transient=1, buffers=1, total=7
)


def plan(*workers: str, version: int = 1) -> PlanRecord:
    stages = tuple(
        StageRecord(
            stage=index,
            worker=worker,
            device_name=worker.upper(),
            first_unit=index * 2,
            stop_unit=index * 2 + 2,
            in_flight=1,
            recompute=False,
            allocator="default",
            send_codec="fp32",
            memory=MEMORY,
            memory_limit=600 * MIB,
            forward_s=1,
            backward_s=1,
            update_s=1,
            send_s=1,
        )
        for index, worker in enumerate(workers)
    )
    return PlanRecord(
        version=version,
        schedule="flush",
        objective="time",
        batch_rows=8,
        micro_batches=2,
        units=2 * len(workers),
        stages=stages,
        left_out=(),
        predicted_step_s=1,
        one_device_step_s=1,
        one_device_peak=1,
    )


def status_after(*records):
    book = StatusBook("runs/x")
    book.take_all(records)
    return book.status()


def test_before_anything_is_written_a_run_is_being_prepared():
    status = status_after()
    assert (status.phase, status.step, status.loss, status.eta_s, status.devices) == ("preparing", 0, None, None, ())
    assert not status.has_ended


def test_a_run_in_the_middle_says_how_far_it_is_and_how_its_devices_do(records):
    status = status_after(
        plan("a", "b"), *records[:11], MemoryRecord(worker="b", memory_bytes=MIB, limit_bytes=9 * MIB)
    )
    assert (status.phase, status.step, status.total_steps, status.epoch) == ("training", 10, 60, 0)
    assert status.loss == pytest.approx(0.2)
    assert status.seconds_per_step == pytest.approx(0.5)
    assert status.eta_s == pytest.approx(25)
    first, second = status.devices
    assert (first.name, first.stage, first.first_unit, first.stop_unit) == ("A", 0, 0, 2)
    assert (first.utilization, first.memory_bytes, first.limit_bytes) == (pytest.approx(0.8), 512 * MIB, 600 * MIB)
    assert (second.memory_bytes, second.limit_bytes) == (MIB, 9 * MIB)


def test_a_device_that_a_new_plan_does_not_use_is_not_shown_as_a_part_of_it(records):
    status = status_after(plan("a", "b"), *records[:5], plan("b", version=2))
    assert [device.worker for device in status.devices] == ["b"]
    assert status.plan_version == 2


def test_how_a_run_ended_is_told_from_its_last_fault():
    assert status_after(START, FaultRecord(slug="interrupted", message="stopped")).phase == "stopped"
    failed = status_after(START, FaultRecord(slug="worker-lost", message="b is gone"))
    assert (failed.phase, failed.fault, failed.has_ended) == ("failed", "b is gone", True)


def test_the_last_changes_are_told_and_older_ones_are_not():
    joined = [MembershipRecord(worker="b", device_name="phone", change="joined", step=step) for step in range(6)]
    stayed = RebalanceRecord(
        cause="drift", reason="", step=1, worth=False, gain_s=0, cost_s=1, moved_units=0, moved_bytes=0, plan_version=1
    )
    status = status_after(START, *joined, stayed)
    assert status.changes == tuple(f"phone joined at step {step}" for step in (2, 3, 4, 5))


def test_a_recovery_takes_the_place_of_the_loss_in_what_is_told():
    lost = MembershipRecord(worker="b", device_name="phone", change="lost", step=7, reason="silent for 15 s")
    recovered = RecoveryRecord(
        worker="b",
        device_name="phone",
        reason="silent for 15 s",
        step=7,
        first_step=6,
        replayed_steps=1,
        noticed_s=15,
        recovered_s=2,
        plan_version=2,
    )
    assert status_after(START, lost).changes == ("phone lost at step 7 (silent for 15 s)",)
    (told,) = status_after(START, lost, recovered).changes
    assert told == "phone lost at step 7 (silent for 15 s), training went on after 2 s, 1 step replayed"


def test_a_fault_of_one_device_is_no_end(records):
    status = status_after(START, FaultRecord(slug="backend", message="opencl left out", worker="a"), *records[1:3])
    assert (status.phase, status.fault) == ("training", "opencl left out")


def test_a_run_that_was_resumed_goes_on_whatever_it_ended_with_before(records):
    resumed = StartRecord(run="r", package_version="0", model="m", total_steps=60, steps_per_epoch=30, first_step=7)
    status = status_after(*records[:10], FaultRecord(slug="worker-lost", message="gone"), resumed)
    assert (status.phase, status.step, status.eta_s) == ("training", 7, None)


def test_after_the_last_step_the_model_is_saved_and_links_are_known(summary):
    status = status_after(plan("desk", "phone"), START, summary)
    assert status.phase == "saving"
    assert [device.link for device in status.devices] == ["direct", ""]
