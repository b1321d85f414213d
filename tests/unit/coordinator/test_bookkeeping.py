"""Figures of a run from what workers report."""

import json
import math
from types import SimpleNamespace

import msgspec
import pytest

from coterie.clock import FakeClock
from coterie.cluster.fault_messages import Vitals
from coterie.cluster.messages import MicroBatchDone, StageReady, StepDone
from coterie.coordinator.bookkeeping import MOST_CHANGES, Bookkeeper, energy_of, summary_json
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.ledger import Ledger
from coterie.ids import WorkerId
from coterie.metrics.fault_records import RebalanceRecord, RecoveryRecord
from coterie.metrics.records import EvaluationRecord, FaultRecord, StepRecord
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.units import MIB

FIRST, LAST = WorkerId("first"), WorkerId("last")


def make_plan():
    memory = MemoryEstimate(
        base=100, weights=10, gradients=10, optimizer=20, weight_versions=0, activations=5, transient=5, buffers=0
    )

    def stage(number, worker, first, stop):
        return StageAssignment(
            stage=number,
            worker=worker,
            device_name=worker,
            first_unit=first,
            stop_unit=stop,
            in_flight=2 - number,
            recompute=False,
            allocator="default",
            send_codec="fp32",
            memory=memory,
            memory_limit=500 * MIB,
            forward_s=0.1,
            backward_s=0.2,
            update_s=0.0,
            send_s=0.0,
        )

    return Plan(
        version=1,
        schedule="flush",
        objective="time",
        batch_rows=4,
        micro_batches=2,
        units=4,
        stages=(stage(0, FIRST, 0, 2), stage(1, LAST, 2, 4)),
        left_out=(),
        predicted_step_s=1.0,
        one_device_step_s=2.0,
        one_device_peak=1000,
    )


def done(step, *, busy_s=0.5, peak=7, sent=(0, 0), norm_is_global=True, **backends):
    return StepDone(
        step=step,
        forward_s=busy_s,
        backward_s=0.0,
        update_s=0.0,
        wait_s=0.0,
        cpu_s=0.0,
        grad_norm=1.5,
        grad_norm_is_global=norm_is_global,
        learning_rate=1e-3,
        updates=1,
        weight_versions=1,
        stashed_bytes=0,
        peak_bytes=peak,
        sent_next_bytes=sent[0],
        sent_previous_bytes=sent[1],
        **backends,
    )


class Books:
    def __init__(self, job):
        self.clock = FakeClock()
        self.records = []
        self.ledger = Ledger((FIRST, LAST))
        self.books = Bookkeeper(job, make_plan(), TrainingFeeder(job, 2), self.records.append, self.clock)

    def step(self, step, loss, seconds, **facts):
        self.clock.advance(seconds)
        self.ledger.micro_batch_done(MicroBatchDone(step=step, micro_batch=0, loss_sum=loss * 10, loss_tokens=10))
        # The last stage is the first to end a step: its update needs no gradient from elsewhere.
        self.ledger.step_done(LAST, done(step, **(facts | {"sent": (0, 30 * (step + 1))})))
        self.books.step(step, self.ledger.step_done(FIRST, done(step, **facts)))


@pytest.fixture
def books(job):
    return Books(job)


def test_a_step_is_recorded_with_its_time_loss_and_what_each_worker_did(books):
    books.step(0, loss=2.0, seconds=2.0, busy_s=0.5)
    (record,) = books.records
    assert isinstance(record, StepRecord)
    assert (record.step, record.epoch, record.loss, record.seconds, record.loss_tokens) == (0, 0, 2.0, 2.0, 10)
    assert (record.learning_rate, record.grad_norm) == (1e-3, 1.5)
    assert [worker.utilization for worker in record.workers] == [0.25, 0.25]
    assert [worker.worker for worker in record.workers] == [FIRST, LAST], "in the plan's order, whoever ended first"


def test_a_norm_that_is_only_one_stages_is_not_shown_as_the_models(books):
    books.step(0, loss=2.0, seconds=1.0, norm_is_global=False)
    assert books.records[0].grad_norm is None


def test_an_evaluation_between_two_steps_is_no_part_of_their_time(books):
    books.step(0, loss=2.0, seconds=1.0)
    books.clock.advance(100.0)
    books.books.training_begins()
    books.step(1, loss=1.0, seconds=1.0)
    assert [record.seconds for record in books.records] == [1.0, 1.0]


def test_the_summary_counts_peaks_links_and_the_mean_step_without_the_first(books):
    books.books.stages_stand(
        {
            FIRST: StageReady(stage=0, link_to_next="unix"),
            LAST: StageReady(stage=1, link_to_next=""),
        }
    )
    for step, peak in enumerate((9, 12, 11)):
        books.step(
            step, loss=3.0 - step, seconds=10.0 if step == 0 else 2.0, busy_s=1.0, peak=peak, sent=(20 * (step + 1), 0)
        )
    quality = EvaluationRecord(
        split="dev", step=3, epoch=1, loss=1.0, metrics={"f1": 0.5}, main_metric="f1", seconds=1.0
    )
    books.books.evaluation(quality)
    summary = books.books.summary("runs/x")
    assert (summary.steps, summary.epochs, summary.seconds) == (3, 1, 14.0)
    assert (summary.first_loss, summary.last_loss, summary.measured_step_s) == (3.0, 1.0, 2.0)
    assert [device.measured_peak_bytes for device in summary.devices] == [12, 12]
    assert [device.base_bytes for device in summary.devices] == [100, 100]
    assert summary.devices[0].predicted_peak_bytes == 150
    assert summary.devices[0].units == "embedding, block 0"
    assert summary.devices[0].utilization == pytest.approx(3 / 14)
    (link,) = summary.links
    assert (link.forward_bytes, link.backward_bytes, link.path) == (60, 90, "unix")
    assert summary.quality == (quality,)
    assert json.loads(summary_json(summary))["output"] == "runs/x"


def test_a_run_without_a_step_has_a_summary_too(books):
    summary = books.books.summary("runs/x")
    assert (summary.steps, summary.first_loss, summary.measured_step_s) == (0, None, 0.0)


def test_backends_are_recorded_with_how_busy_they_were_and_when_one_failed(books):
    books.step(0, loss=2.0, seconds=2.0, backend_busy_s={"torch": 1.0, "opencl": 0.5})
    books.step(1, loss=2.0, seconds=2.0, backend_busy_s={"torch": 1.4}, backends_left_out={"opencl": "it failed"})
    faults = [record for record in books.records if isinstance(record, FaultRecord)]
    assert {(fault.slug, fault.worker, fault.step) for fault in faults} == {("backend", FIRST, 1), ("backend", LAST, 1)}
    assert "opencl is left out from now on: it failed" in faults[0].message
    steps = [record for record in books.records if isinstance(record, StepRecord)]
    assert [step.workers[0].backends for step in steps] == [{"torch": 0.5, "opencl": 0.25}, {"torch": 0.7}]
    device = books.books.summary("out").devices[0]
    assert device.backends == pytest.approx({"torch": 0.6, "opencl": 0.125})
    assert device.backends_left_out == {"opencl": "it failed"}


@pytest.mark.parametrize(("joules", "is_noted"), [(12.5, True), (math.nan, False), (math.inf, False), (None, False)])
def test_energy_that_is_no_number_is_not_written_down(joules, is_noted):
    member = SimpleNamespace(
        worker=WorkerId("phone"), hello=SimpleNamespace(name="phone"), vitals=Vitals(joules=joules, watts_source="rapl")
    )
    assert (energy_of(member) is not None) == is_noted


def test_a_device_that_comes_and_goes_for_days_makes_no_summary_longer_and_longer(books):
    for number in range(MOST_CHANGES + 3):
        books.books.planned(msgspec.structs.replace(make_plan(), version=number + 2))
        books.books.took(
            RecoveryRecord(
                worker=LAST,
                device_name=LAST,
                reason="the link broke",
                step=number,
                first_step=number,
                replayed_steps=0,
                noticed_s=0.1,
                recovered_s=1.0,
                plan_version=number + 2,
            )
        )
        books.books.took(
            RebalanceRecord(
                cause="drift",
                reason="no gain",
                step=number,
                worth=False,
                gain_s=0.0,
                cost_s=1.0,
                moved_units=0,
                moved_bytes=0,
                plan_version=number + 2,
            )
        )
    summary = books.books.summary("runs/x")
    assert [record.step for record in summary.recoveries] == list(range(3, MOST_CHANGES + 3))
    assert summary.rebalances == ()
    assert summary.counts["earlier losses and moves, in the event log only"] == 3
    assert len([record for record in books.records if isinstance(record, RecoveryRecord)]) == MOST_CHANGES + 3
    assert [device.worker for device in summary.devices] == [FIRST, LAST]
