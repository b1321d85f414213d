"""What is said of a run whose coordinator does not answer, by what it has left in its folder."""

import pytest

from coterie.coordinator.control_file import Control, this_process, write_control
from coterie.coordinator.run_control import RunControl, recorded_status
from coterie.coordinator.run_folder import EVENTS, LOCK, RECIPE, SUMMARY
from coterie.errors import ControlRefusedError, NetworkError, NoSuchRunError, NotRunningError
from coterie.metrics.events import EventLog
from coterie.metrics.records import FaultRecord, StartRecord, StepRecord, SummaryRecord

START = StartRecord(run="r", package_version="0", model="m", total_steps=3, steps_per_epoch=3)
STEP = StepRecord(step=0, epoch=0, loss=1.0, tokens=1, loss_tokens=1, seconds=1, learning_rate=1)
SUMMED = SummaryRecord(
    model="m",
    method="full",
    schedule="flush",
    steps=3,
    epochs=1,
    seconds=1,
    tokens=1,
    first_loss=1,
    last_loss=1,
    predicted_step_s=1,
    measured_step_s=1,
    one_device_step_s=1,
    one_device_peak_bytes=1,
    devices=(),
)


def left(folder, *records):
    (folder / RECIPE).write_text("")
    (folder / LOCK).write_text("")
    with EventLog(folder / EVENTS) as log:
        for record in records:
            log.write(record)
    return folder


def control(**changes):
    machine, pid, began_s = this_process()
    known = {"machine": machine, "pid": pid, "began_s": began_s, "hosts": ("127.0.0.1",), "port": 1}
    return Control(**({"run": "r", "fingerprint": "0" * 64, "token": "a-token-of-the-run"} | known | changes))


def ends(folder):
    """What a verb that needs a run says of one that has ended, and its advice."""
    with pytest.raises(NotRunningError) as caught:
        RunControl(folder).pause()
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize("name", ["gone", "."])
def test_a_folder_without_a_run_is_named(tmp_path, name):
    with pytest.raises(NoSuchRunError, match=r"does not exist|holds no run"):
        RunControl(tmp_path / name).status()
    with pytest.raises(NoSuchRunError):
        RunControl(tmp_path / name).stop()


def test_a_finished_run_says_where_its_model_is(tmp_path):
    (left(tmp_path, START, STEP, SUMMED) / SUMMARY).write_text("{}")
    assert RunControl(tmp_path).status().phase == "finished"
    message, hint = ends(tmp_path)
    assert "has finished" in message
    assert str(tmp_path / "model") in message
    assert hint == ""


def test_a_failed_run_says_why_and_how_to_go_on(tmp_path):
    left(tmp_path, START, STEP, FaultRecord(slug="worker-lost", message="b is gone"))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    message, hint = ends(tmp_path)
    assert "ended with an error after step 1 of 3: b is gone" in message
    assert f"coterie train {tmp_path / RECIPE} --resume` goes on from the checkpoint of step 1" in hint


def test_a_stopped_run_without_a_checkpoint_begins_anew(tmp_path):
    left(tmp_path, START, STEP, FaultRecord(slug="interrupted", message="stopped"))
    message, hint = ends(tmp_path)
    assert "was stopped after step 1 of 3" in message
    assert "begins anew" in hint


def test_a_run_that_was_stopped_at_once_or_before_its_first_step_is_stopped(tmp_path):
    assert recorded_status(left(tmp_path, START, STEP)).phase == "stopped"
    (tmp_path / EVENTS).unlink()
    assert "was stopped before its first step" in ends(tmp_path)[0]


def test_a_killed_coordinator_is_told_by_the_control_file_that_it_left(tmp_path):
    left(tmp_path, START, STEP)
    write_control(tmp_path, control(began_s=0.0))
    assert RunControl(tmp_path).status().phase == "killed"
    assert "its process was killed, or its machine switched off, after step 1 of 3" in ends(tmp_path)[0]
    with pytest.raises(NotRunningError):
        RunControl(tmp_path).link()


def test_a_run_that_a_process_holds_is_prepared_or_saved(tmp_path, held_folder):
    held_folder(left(tmp_path, START, STEP, SUMMED))
    assert recorded_status(tmp_path).phase == "saving"
    assert ends(tmp_path)[1] == "wait a moment"
    left(tmp_path, START)
    assert recorded_status(tmp_path).phase == "preparing"


def test_a_process_that_has_just_begun_or_begins_anew_is_preparing(tmp_path, held_folder):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / LOCK).write_text("")
    old = tmp_path / "old"
    old.mkdir()
    left(old, START, STEP, FaultRecord(slug="worker-lost", message="gone"))
    for folder in (tmp_path / "new", old):
        held_folder(folder)
        assert RunControl(folder).status().phase == "preparing"


def test_a_coordinator_that_lives_and_does_not_answer_is_no_run_that_has_ended(tmp_path):
    left(tmp_path, START, STEP)
    write_control(tmp_path, control())
    with pytest.raises(NetworkError, match="port 1") as caught:
        RunControl(tmp_path).status()
    assert "--show-link" in caught.value.hint


def test_a_run_of_this_machine_only_has_no_link_for_others(tmp_path):
    left(tmp_path, START)
    write_control(tmp_path, control())
    with pytest.raises(ControlRefusedError, match="listens on this machine only"):
        RunControl(tmp_path).link()
    write_control(tmp_path, control(others=("192.168.1.5", "fd00::1")))
    text = RunControl(tmp_path).link()
    assert text.startswith("coterie-control://192.168.1.5:1/?fp=000")
    assert RunControl(link=text).link() == text
