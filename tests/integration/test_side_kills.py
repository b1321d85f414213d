"""Killed at any moment, a side-tuning run is resumed with what the server has, and ends with the same bits."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from coterie.coordinator import side_assignment
from coterie.errors import ActivationCacheError, CheckpointError, WorkerLostError
from coterie.metrics.records import StepRecord
from coterie.worker import side_intake
from coterie.worker.settings import WorkerSettings
from coterie.worker.side_server import SideServer

OPTIONS = {
    "mode": "side",
    "workers": 2,
    "min_workers": 1,
    "epochs": 5,
    "evaluate_every_epoch": False,
    "learning_rate": 5e-3,
    "rank": 8,
    "checkpoint_every": 5,
}


def trained_in(folder):
    parts = ("side_network", "task_layers")
    return {name: tensor for part in parts for name, tensor in load_file(folder / f"{part}.safetensors").items()}


def assert_equal(some, others):
    assert some.keys() == others.keys()
    assert [name for name, tensor in some.items() if not torch.equal(tensor, others[name])] == []


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_recipe, cluster, run):
    """What is trained if nothing goes wrong."""
    watcher = cluster(WorkerSettings(name="phone"), WorkerSettings(name="server", role="server"))
    result = run(make_recipe(tmp_path_factory.mktemp("unharmed") / "run", **OPTIONS), watcher)
    return trained_in(result.model_folder)


def test_a_run_that_is_cut_off_goes_on_to_the_same_bits(tmp_path, make_recipe, cluster, run, unharmed, monkeypatch):
    """As a kill does it: the server has its cache and the state that it saved last, and nothing else."""
    monkeypatch.setattr(SideServer, "_save_last", lambda _self: None)
    kept = WorkerSettings(name="server", role="server", cache_folder=tmp_path / "kept")

    def cut_off_at(step):
        def watch(record):
            if isinstance(record, StepRecord) and record.step == step:
                raise WorkerLostError("cut off")

        return watch

    for attempt, step in enumerate((3, 30)):
        watcher = cluster(WorkerSettings(name="phone"), kept)
        watcher.on_record = cut_off_at(step)
        with pytest.raises(WorkerLostError):
            run(make_recipe(tmp_path / "run", resume=attempt > 0, **OPTIONS), watcher)
    result = run(make_recipe(tmp_path / "run", resume=True, **OPTIONS), cluster(WorkerSettings(name="phone"), kept))
    assert_equal(trained_in(result.model_folder), unharmed)


def test_a_resumed_additive_run_needs_no_device_for_what_was_collected(tmp_path, make_recipe, cluster, run, data):
    kept = WorkerSettings(name="server", role="server", cache_folder=tmp_path / "kept")
    options = OPTIONS | {"additive": True, "data.test": str(data / "test.conll")}

    def cut_off(record):
        if isinstance(record, StepRecord) and record.step == 30:
            raise WorkerLostError("cut off")

    whole = run(make_recipe(tmp_path / "whole", **options), cluster(WorkerSettings(name="phone"), kept))
    watcher = cluster(WorkerSettings(name="phone"), kept)
    watcher.on_record = cut_off
    with pytest.raises(WorkerLostError):
        run(make_recipe(tmp_path / "run", **options), watcher)
    result = run(make_recipe(tmp_path / "run", resume=True, **options | {"workers": 1}), cluster(kept))
    assert result.plan is None
    assert_equal(trained_in(result.model_folder), trained_in(whole.model_folder))
    (quality,), (wanted,) = result.quality, whole.quality
    assert quality.metrics == wanted.metrics
    assert quality.details == wanted.details


@pytest.mark.slow
@pytest.mark.timeout(1900)  # three starts of three processes each, on a machine that may have much else to do
def test_device_server_and_both_may_be_killed(
    tmp_path, model, data, commands, wait_until, recorded, children_of, unharmed
):
    folder = tmp_path / "run"
    words = ["train", "--mode", "side", "--model", model, "--train", data, "--output", folder, "--epochs", 5]
    words += ["--batch-rows", 4, "--micro-batches", 2, "--learning-rate", "5e-3", "--side-rank", 8]
    words += ["--checkpoint-every", 5, "--heartbeat-s", 0.5, "--no-evaluate-every-epoch"]
    words += ["--local-worker", "name=phone,speed=0.2", "--local-worker", "name=desk,role=server,speed=0.2"]

    def interrupted(after_steps, *names):
        resume = ["--resume"] if folder.exists() else []
        command = commands(*words, *resume)
        wait_until(lambda: len(recorded(folder, "step")) >= after_steps, "the step", command, timeout_s=400)
        found = children_of(command.process.pid)
        for name in names:
            os.kill(found[name], signal.SIGKILL)
        code, _, error = command.end()
        assert code == 8, error
        return recorded(folder, "step")[-1]["step"]

    interrupted(2, "phone", "desk")  # while they collect
    interrupted(40, "desk")  # while it replays
    command = commands(*words, "--resume")
    code, _, error = command.end(timeout_s=600)
    assert code == 0, error
    assert_equal(trained_in(folder / "model"), unharmed)


def test_the_coordinator_may_leave_and_fetch_later(tmp_path, make_recipe, cluster, run, unharmed):
    server = WorkerSettings(name="server", role="server", cache_folder=tmp_path / "kept")
    options = OPTIONS | {"leave_after_collect": True}
    watcher = cluster(WorkerSettings(name="phone"), server)
    left = run(make_recipe(tmp_path / "run", **options), watcher)  # waits for the server, which goes on alone
    assert not left.model_folder.exists()
    assert watcher.failures == {}
    assert any("going on alone" in said for said in watcher.said)
    late = cluster(server)
    result = run(make_recipe(tmp_path / "run", resume=True, **options), late)
    assert late.losses == []
    assert_equal(trained_in(result.model_folder), unharmed)
    with pytest.raises(CheckpointError, match="finished"):
        run(make_recipe(tmp_path / "run", resume=True, **options), cluster(server))


def test_a_server_without_a_folder_is_not_left_alone_with_what_it_would_lose(tmp_path, make_recipe, cluster, run):
    watcher = cluster(WorkerSettings(name="phone"), WorkerSettings(name="server", role="server"))
    with pytest.raises(ActivationCacheError, match="server keeps its cache in memory") as refused:
        run(make_recipe(tmp_path / "run", **OPTIONS | {"leave_after_collect": True}), watcher)
    assert "--cache-folder" in refused.value.hint
    assert watcher.losses == []


def test_a_second_run_over_the_same_data_needs_no_new_activations(
    tmp_path, make_recipe, cluster, run, data, monkeypatch
):
    monkeypatch.setattr(side_intake, "BLOCK_ROWS", 4)
    monkeypatch.setattr(side_assignment, "BLOCK_ROWS", 4)
    server = WorkerSettings(name="server", role="server", cache_folder=tmp_path / "kept")
    options = OPTIONS | {"epochs": 1, "data.dev": str(data / "dev.conll"), "data.test": str(data / "test.conll")}

    def passes(name, train, rank):
        watcher = cluster(WorkerSettings(name="phone"), server)
        changes = {"data.train": str(train), "rank": rank}
        return run(make_recipe(tmp_path / name, **options | changes), watcher).summary.side.device_passes

    grown = tmp_path / "grown.conll"
    grown.write_text((data / "train.conll").read_text() + "\n" + (data / "test.conll").read_text())
    assert passes("first", data / "train.conll", 8) == 1
    assert passes("second", data / "train.conll", 4) == 0
    assert 0 < passes("third", grown, 4) < 1
