"""Real processes that are killed, stopped and resumed: what is kept, what is said, and that nothing is left behind."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket

import psutil
import pytest
import torch

from coterie import api
from coterie.checkpoint.names import replica_folder
from coterie.checkpoint.store import CheckpointStore
from coterie.coordinator.job import prepare_job
from coterie.coordinator.one_device import largest_difference, run_on_one_device
from coterie.ids import RunId
from coterie.local import JOIN_LINK_VARIABLE
from coterie.worker.settings import WorkerSettings

STEPS_PER_EPOCH = 9
LONG = 400


@pytest.fixture(scope="session")
def free_port():
    """A port that nothing uses, nor takes meanwhile: systems hand out higher ones, other test processes try others."""
    tester = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    candidates = itertools.count(20_000 + 500 * (tester % 16))

    def is_free(port):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return True
        return False

    return lambda: next(filter(is_free, candidates))


@pytest.fixture
def train(commands, model, data, tmp_path, free_port):
    """Starts `coterie train` with local workers; the command, its output folder and its port."""

    def start(*words, workers=("left", "right"), epochs=LONG):
        output, port = tmp_path / "run", free_port()
        options = ["--model", model, "--train", data, "--output", output, "--port", port, "--host", "127.0.0.1"]
        options += ["--batch-rows", 4, "--micro-batches", 2, "--learning-rate", 5e-3, "--lr-schedule", "constant"]
        options += ["--epochs", epochs, "--heartbeat-s", 0.5]
        for name in workers:
            options += ["--local-worker", f"name={name}"]
        if workers:
            options += ["--min-workers", len(workers)]
        return commands("train", *options, *words), output, port

    return start


def assert_free(port):
    socket.create_server(("127.0.0.1", port)).close()


def checkpoints(output):
    return CheckpointStore(output / "checkpoints").steps()


def resumed_equals_undisturbed(output, make_recipe, watcher, workers):
    """Go on for a few steps on other workers; the losses must be those of a run that nothing happened to."""
    stores = CheckpointStore(output / "checkpoints"), CheckpointStore(replica_folder(output))
    start = max(state.step for store in stores if (state := store.latest()) is not None)
    options = {"epochs": LONG, "max_steps": start + 4, "lr_schedule": "constant", "checkpoint_every": 5}
    recipe = make_recipe(output, resume=True, workers=workers, **options)
    try:
        result = api.train(recipe, watcher)
    finally:
        watcher.wait()
    total = start + len(result.losses)
    whole = run_on_one_device(prepare_job(recipe, RunId("whole"), lambda _text: None), 2, total).losses
    assert len(result.losses) == 4
    assert largest_difference(result.losses, whole[start:]) < 1e-6 * total
    assert result.summary.quality
    assert watcher.failures == {}


def test_a_run_whose_workers_are_all_killed_ends_and_another_number_of_workers_goes_on(
    train, wait_until, recorded, children_of, running, make_recipe, cluster
):
    command, output, port = train("--checkpoint-every", 5, "--verbose")
    wait_until(lambda: len(recorded(output, "step")) > 12, "training", command)
    workers = children_of(command.process.pid)
    assert set(workers) == {"left", "right"}
    token = psutil.Process(workers["left"]).environ()["COTERIE_JOIN_LINK"].rpartition("#")[2]
    for worker in workers.values():
        psutil.Process(worker).kill()
    code, out, error = command.end()
    assert code == 8
    found = re.search(
        r"error \[worker-lost\]: the local worker (left|right) was killed by signal 9; no worker is left", error
    )
    assert found
    assert f"worker-{found[1]}.log" in error
    assert re.search(r"the state after step \d+ of \d+ is kept: continue with --resume", error)
    assert not running(workers.values())
    assert_free(port)
    assert checkpoints(output)
    assert recorded(output, "fault")[-1]["slug"] == "worker-lost"
    assert not (output / "model").exists()
    written = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert {path.name for path in (output / "workers").iterdir()} == {"worker-left.log", "worker-right.log"}
    assert len(token) > 8
    assert not any(token.encode() in content for content in (*written, out.encode(), error.encode()))
    resumed_equals_undisturbed(output, make_recipe, cluster(), workers=3)


def test_workers_of_a_killed_coordinator_end_by_themselves_and_the_run_can_go_on(
    train, wait_until, recorded, children_of, running, make_recipe, cluster
):
    command, output, port = train("--checkpoint-every", 5)
    wait_until(lambda: len(recorded(output, "step")) > 12, "training", command)
    workers = children_of(command.process.pid)
    assert len(workers) == 2
    command.process.kill()
    command.end()
    wait_until(lambda: not running(workers.values()), "the end of the workers")
    assert_free(port)
    single = cluster(WorkerSettings(name="alone"))
    resumed_equals_undisturbed(output, make_recipe, single, workers=1)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_stop_keeps_a_checkpoint_of_the_last_step_and_leaves_nothing_behind(
    number, train, wait_until, recorded, children_of, running
):
    command, output, port = train()
    wait_until(lambda: len(recorded(output, "step")) > 3, "training", command)
    workers = children_of(command.process.pid)
    command.signal(number)
    code, out, error = command.end()
    assert code == 130
    steps = len(recorded(output, "step"))
    assert f"the run was stopped after step {steps} of {LONG * STEPS_PER_EPOCH}; a checkpoint was kept" in error
    assert "stopping: a checkpoint is made first" in out
    assert checkpoints(output)[-1] == steps
    assert not running(workers.values())
    assert_free(port)


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(train, wait_until, recorded, children_of, running):
    command, output, port = train("--schedule", "stash")  # whose segments are a whole epoch: the first one waits
    wait_until(lambda: len(recorded(output, "step")) > 3, "training", command)
    workers = children_of(command.process.pid)
    command.signal(signal.SIGINT)
    command.signal(signal.SIGINT)
    code, _, error = command.end()
    assert code == 130
    assert "error [interrupted]" in error
    assert "Traceback" not in error
    assert not running(workers.values())
    assert_free(port)


@pytest.mark.slow
def test_ctrl_c_while_devices_are_measured(train, wait_until, children_of, running):
    command, output, port = train(workers=("left",))
    log = output / "workers" / "worker-left.log"
    wait_until(lambda: log.exists() and "measuring" in log.read_text(), "measuring", command)
    workers = children_of(command.process.pid)
    command.signal(signal.SIGINT)
    code, _, error = command.end()
    assert code == 130
    assert "--resume" not in error, "there is no checkpoint to go on from"
    assert not running(workers.values())
    assert_free(port)


def test_a_worker_joins_with_the_printed_link_and_the_run_waits_on_when_it_leaves(train, commands):
    command, output, port = train("--workers", 2, workers=())
    lines = []
    for line in command.process.stdout:
        lines.append(line)
        if found := re.search(r"coterie worker '(coterie://\S+)'", line):
            break
    link = found.group(1)
    assert lines[0].startswith("loading "), "the first word does not wait for the model"
    assert f":{port}/" in link
    worker = commands("worker", link, "--name", "guest")
    for line in worker.process.stdout:
        if line.startswith("joined run"):
            break
    worker.signal(signal.SIGTERM)
    code, _, error = worker.end()
    assert (code, "stopped by its owner" in error) == (130, True)
    for line in command.process.stdout:
        if "guest left before the run began" in line:
            break
    command.signal(signal.SIGINT)
    code, _, error = command.end()
    assert code == 130
    assert "error [interrupted]: the run was stopped" in error
    assert_free(port)
    assert not checkpoints(output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that is to be missing")
def test_a_local_worker_that_dies_before_it_joins_ends_the_run_soon_with_its_own_error(train):
    words = ("--local-worker", "name=gpu,device=cuda", "--workers", 1, "--join-timeout-s", 600)
    command, output, port = train(*words, workers=())
    code, _, error = command.end()
    assert code == 2
    assert "error [usage]: the local worker gpu ended: torch finds no cuda device" in error
    assert_free(port)
    assert not checkpoints(output)


def test_other_processes_join_a_local_worker_and_train_with_it(train, commands):
    command, output, _ = train(
        "--workers", 2, "--min-workers", 2, "--local-worker", "name=home", "--max-steps", 4, workers=()
    )
    for line in command.process.stdout:
        if found := re.search(r"coterie worker '(coterie://\S+)'", line):
            break
    guest = commands("worker", "--name", "guest", "--no-direct-links", environment={JOIN_LINK_VARIABLE: found.group(1)})
    code, out, error = command.end()
    assert code == 0, error
    assert (output / "model" / "model.safetensors").is_file()
    summary = json.loads((output / "summary.json").read_text())
    assert {device["device_name"] for device in summary["devices"]} == {"home", "guest"}
    assert [link["path"] for link in summary["links"]] == ["relayed"]
    assert "model: " in out
    code, out, error = guest.end()
    assert code == 0, error
    assert "the run is over: finished" in out


@pytest.mark.slow
def test_a_worker_that_freezes_is_lost_after_the_silence_limit_and_does_not_stay(
    train, wait_until, recorded, children_of, running
):
    command, output, port = train("--heartbeat-timeout-s", 15)
    wait_until(lambda: len(recorded(output, "step")) > 3, "training", command)
    workers = children_of(command.process.pid)
    psutil.Process(workers["right"]).suspend()
    wait_until(lambda: recorded(output, "recovery"), "recovery", command)
    command.signal(signal.SIGINT)
    code, out, _ = command.end()
    assert code == 130
    assert "right has been silent for" in out
    assert "training went on after" in out
    assert not running(workers.values())
    assert_free(port)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_memory_does_not_grow_over_500_steps(train, recorded):
    command, output, _ = train("--max-steps", 600)
    code, _, error = command.end(600)
    assert code == 0, error
    steps = recorded(output, "step")
    assert len(steps) == 600
    for index in (0, 1):
        sizes = [step["workers"][index]["memory_bytes"] for step in steps if step["workers"][index]["memory_bytes"]]
        early, late = max(sizes[50:150]), max(sizes[-100:])
        assert late < early + 4 * 2**20, f"grew from {early} to {late}"
