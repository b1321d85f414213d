"""What a run finds in its folder, what it leaves there, and how it goes on from that."""

import signal
import socket

import pytest

from coterie import api
from coterie.coordinator.one_device import largest_difference
from coterie.errors import (
    CheckpointError,
    InterruptedRunError,
    NetworkError,
    StorageError,
    UsageError,
)
from coterie.metrics.records import StepRecord
from coterie.worker.settings import WorkerSettings


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, make_recipe, cluster, run, checkpoints):
    """A run that ended at its third checkpoint, as a kill would have left it."""
    recipe = make_recipe(tmp_path_factory.mktemp("stopped") / "run", workers=1, epochs=1, checkpoint_every=3)
    watcher = cluster(WorkerSettings(name="only"))

    def fail(record):
        if isinstance(record, StepRecord) and record.step == 7:
            raise StorageError("the test's disk is full")

    watcher.on_record = fail
    with pytest.raises(StorageError, match="disk is full"):
        run(recipe, watcher)
    assert checkpoints(recipe) == (3, 6)
    return recipe


def test_a_new_run_does_not_fall_into_an_old_ones_folder(stopped, cluster):
    with pytest.raises(UsageError, match="checkpoints of an earlier run") as caught:
        api.train(stopped, cluster())
    assert "--resume" in caught.value.hint
    assert "--output" in caught.value.hint


def test_resuming_with_other_settings_names_all_of_them(stopped, cluster, changed):
    other = changed(changed(stopped, "train", learning_rate=1e-4, seed=5, schedule="gpipe"), "run", resume=True)
    with pytest.raises(CheckpointError) as caught:
        api.train(other, cluster())
    for setting in ("learning_rate", "seed", "schedule"):
        assert setting in caught.value.message


def test_resuming_where_nothing_was_kept_says_so(tmp_path, make_recipe, cluster):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        api.train(make_recipe(tmp_path / "nothing", resume=True), cluster())


def test_a_folder_that_cannot_be_written_is_refused_before_workers_are_asked(tmp_path, make_recipe, cluster):
    (tmp_path / "file").write_text("in the way")
    watcher = cluster()
    with pytest.raises(StorageError, match="cannot write") as caught:
        api.train(make_recipe(tmp_path / "file" / "run"), watcher)
    assert "--output" in caught.value.hint
    assert not watcher.threads


def test_a_folder_with_somebody_elses_model_is_refused_before_anything_is_trained(tmp_path, make_recipe, cluster):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "precious.bin").write_bytes(b"not ours")
    watcher = cluster()
    with pytest.raises(StorageError, match=r"precious\.bin"):
        api.train(make_recipe(tmp_path / "run"), watcher)
    assert not watcher.threads


def test_a_resumed_run_ends_as_the_undisturbed_one(stopped, cluster, run, changed, alone):
    watcher = cluster(WorkerSettings(name="only"))
    result = run(changed(stopped, "run", resume=True), watcher)
    first = result.summary.first_step
    assert first in {7, 8}, "from the last replica, which is newer than the last checkpoint"
    assert largest_difference(result.losses, alone(stopped, 9)[first:]) < 1e-6
    assert result.summary.steps == len(result.losses) == 9 - first
    assert f"continuing after step {first} of 9" in watcher.notices
    assert watcher.steps == 9 - first, "the estimate is that of the steps that are left"


def test_a_port_that_is_taken_is_refused_before_workers_are_started(tmp_path, make_recipe, cluster):
    watcher = cluster()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NetworkError, match=f"127.0.0.1 port {port}") as caught:
            api.train(make_recipe(tmp_path / "run", port=port), watcher)
    assert caught.value.exit_code == 16
    assert not watcher.threads


def test_a_run_stopped_in_its_last_step_is_finished_by_a_resume(
    tmp_path, make_recipe, cluster, run, checkpoints, changed
):
    recipe = make_recipe(tmp_path / "run", workers=1)
    watcher = cluster(WorkerSettings(name="only"))

    def stop(record):
        if isinstance(record, StepRecord) and record.step == 8:
            signal.raise_signal(signal.SIGINT)

    watcher.on_record = stop
    with pytest.raises(InterruptedRunError, match="during an evaluation"):
        run(recipe, watcher)
    assert checkpoints(recipe)[-1] == 9
    assert not (tmp_path / "run" / "model").exists()
    again = cluster(WorkerSettings(name="only"))
    result = run(changed(recipe, "run", resume=True), again)
    assert result.losses == ()
    assert {record.split for record in result.quality} == {"dev", "test"}
    assert (result.model_folder / "model.safetensors").is_file()


def test_a_stop_before_the_first_step_leaves_no_checkpoint_and_says_nothing_of_one(
    tmp_path, make_recipe, cluster, run, checkpoints
):
    recipe = make_recipe(tmp_path / "run", workers=1)
    watcher = cluster(WorkerSettings(name="only"))
    planned = watcher.planned

    def stop(*facts):
        planned(*facts)
        signal.raise_signal(signal.SIGINT)

    watcher.planned = stop
    with pytest.raises(InterruptedRunError, match="the run was stopped") as caught:
        run(recipe, watcher)
    assert caught.value.hint == ""
    assert not checkpoints(recipe)
    assert watcher.failures == {}
