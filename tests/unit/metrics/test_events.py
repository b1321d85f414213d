"""`events.jsonl`: what is written is read back, also after a kill in the middle of a line."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.clock import FakeClock
from coterie.errors import DataError, StorageError
from coterie.metrics.events import EventLog, read_events, set_aside, valid_evaluations, valid_steps
from coterie.metrics.records import (
    AnyRecord,
    EvaluationRecord,
    FaultRecord,
    MemoryRecord,
    PlanRecord,
    StartRecord,
    StepRecord,
    TrafficRecord,
)
from coterie.planner.plan import LeftOut, MemoryEstimate, Plan, StageAssignment


def step(number: int, loss: float | None = 1.0) -> StepRecord:
    return StepRecord(step=number, epoch=0, loss=loss, tokens=1, loss_tokens=1, seconds=1.0, learning_rate=0.1)


def test_an_earlier_attempts_events_are_set_aside_and_the_last_such_file_is_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    set_aside(path)
    assert not list(tmp_path.iterdir())
    for text in ("first", "second"):
        path.write_text(text)
        set_aside(path)
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl.old"]
    assert (tmp_path / "events.jsonl.old").read_text() == "second"


def start(first_step: int) -> StartRecord:
    return StartRecord(run="r", package_version="0", model="m", total_steps=9, steps_per_epoch=3, first_step=first_step)


def evaluation(at_step: int) -> EvaluationRecord:
    return EvaluationRecord(
        split="dev", step=at_step, epoch=1, loss=1.0, metrics={"f1": 0.5}, main_metric="f1", seconds=1
    )


def test_records_read_back_equal_with_their_date(tmp_path, records, summary):
    everything = (
        *records,
        MemoryRecord(worker="a", memory_bytes=1, limit_bytes=2),
        TrafficRecord(source="a", target="b", sent_bytes=3),
        FaultRecord(slug="worker-lost", message="phone is gone", worker="phone", step=4),
        summary,
    )
    with EventLog(tmp_path / "run" / "events.jsonl", FakeClock(1_700_000_000.0)) as log:
        for record in everything:
            log.write(record)
    back = read_events(tmp_path / "run" / "events.jsonl")
    assert back == tuple(msgspec.structs.replace(record, at_s=1_700_000_000.0) for record in everything)


def test_each_line_is_one_json_object_with_a_type(tmp_path, records):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for record in records:
            log.write(record)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["start"] + ["step"] * 60 + ["evaluation"] * 2


def test_a_truncated_last_line_is_ignored_by_the_reader(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step(0))
        log.write(step(1))
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:length])
        assert [record.step for record in valid_steps(read_events(path))] == [0]


def test_a_new_log_cuts_a_partial_line_off_before_it_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step(0))
    with path.open("ab") as file:
        file.write(b'{"type":"step","epo' + b"x" * 200_000)
    with EventLog(path) as log:
        log.write(step(1))
    assert [record.step for record in valid_steps(read_events(path))] == [0, 1]


def test_a_file_that_is_one_partial_line_is_emptied(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type":')
    with EventLog(path) as log:
        log.write(step(7))
    assert [record.step for record in valid_steps(read_events(path))] == [7]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step(0))
    with path.open("ab") as file:
        file.write(b'{"type":"nonsense"}\n')
    with pytest.raises(DataError, match=r"events\.jsonl, line 2: "):
        read_events(path)


def test_a_loss_that_is_not_finite_reads_back_as_none(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(step(0, float("nan")))
        log.write(step(1, float("inf")))
    assert [record.loss for record in valid_steps(read_events(tmp_path / "events.jsonl"))] == [None, None]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_a_missing_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        read_events(tmp_path / "events.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_storage_error(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - the log closes it
    with pytest.raises(StorageError, match="No space left"):
        log.write(step(0))
    log.close()


def test_what_was_written_survives_a_kill(tmp_path):
    path = tmp_path / "events.jsonl"
    program = (
        "import sys; from pathlib import Path; from coterie.metrics.events import EventLog\n"
        "from coterie.metrics.records import FaultRecord\n"
        "log = EventLog(Path(sys.argv[1]))\n"
        "for number in range(1_000_000):\n"
        "    log.write(FaultRecord(slug='x', message='m' * 50, step=number))\n"
        "    if number == 50: print('go', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    process.kill()
    process.communicate()
    steps = [record.step for record in read_events(path)]
    assert len(steps) > 50
    assert steps == list(range(len(steps)))


def test_a_resumed_run_replaces_what_it_does_again():
    records: list[AnyRecord] = [
        start(0),
        step(0),
        step(1),
        evaluation(2),
        step(2),
        evaluation(3),
        start(2),
        step(2, 0.5),
    ]
    assert [(record.step, record.loss) for record in valid_steps(records)] == [(0, 1.0), (1, 1.0), (2, 0.5)]
    assert [record.step for record in valid_evaluations(records)] == [2]


@given(st.lists(st.integers(0, 8) | st.tuples(st.integers(0, 8))))
def test_valid_steps_are_sorted_and_unique(choices):
    records = [start(choice[0]) if isinstance(choice, tuple) else step(choice) for choice in choices]
    numbers = [record.step for record in valid_steps(records)]
    assert numbers == sorted(set(numbers))


def test_a_plan_becomes_a_record_with_all_its_figures():
    memory = MemoryEstimate(
        base=1, weights=2, gradients=3, optimizer=4, weight_versions=5, activations=6, transient=7, buffers=8
    )
    stage = StageAssignment(
        stage=0, worker="w", device_name="desk", first_unit=0, stop_unit=3, in_flight=1, recompute=False,
        allocator="tight", send_codec="fp32", memory=memory, memory_limit=99, forward_s=1, backward_s=2,
        update_s=3, send_s=4,
    )  # fmt: skip
    plan = Plan(
        version=2, schedule="flush", objective="time", batch_rows=8, micro_batches=4, units=8, stages=(stage,),
        left_out=(LeftOut(worker="x", device_name="phone", reason="too slow"),), predicted_step_s=1.5,
        one_device_step_s=2.5, one_device_peak=70, notes=("a note",),
    )  # fmt: skip
    record = PlanRecord.of(plan)
    assert record.stages[0].memory.total == 36 == memory.total
    assert record.left_out[0].reason == "too slow"
    plain = msgspec.to_builtins(plan)
    kept = msgspec.to_builtins(record)
    assert {key: kept[key] for key in ("version", "schedule", "predicted_step_s", "notes")} == {
        key: plain[key] for key in ("version", "schedule", "predicted_step_s", "notes")
    }
    assert set(plain) <= set(kept), "a new field of Plan needs a place in PlanRecord"
    assert set(plain["stages"][0]) <= set(kept["stages"][0])
