"""Workers that lose the coordinator or each other, and go on: nobody starts anything again by hand."""

import asyncio
import re
import signal

import psutil
import pytest
import torch

from coterie.api import training
from coterie.checkpoint.names import checkpoint_folder
from coterie.checkpoint.store import CheckpointStore
from coterie.coordinator.run import TrainingRun
from coterie.metrics.records import RecoveryRecord, StepRecord
from coterie.worker import program
from coterie.worker.peers import Peers

STEPS = 14


def final_tensors(recipe):
    checkpoint = CheckpointStore(checkpoint_folder(recipe.run.output)).latest()
    assert checkpoint.step == STEPS
    parameters, _ = checkpoint.read(checkpoint.manifest.unit_of)
    return parameters


def assert_same(recipe, other):
    mine, theirs = final_tensors(recipe), final_tensors(other)
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


@pytest.fixture(scope="module")
def options():
    return {"epochs": 2, "max_steps": STEPS, "rebalance": False, "method": "lora", "lora_dropout": 0.1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, make_recipe, cluster, run, options):
    """A finished run that nothing happened to."""
    recipe = make_recipe(tmp_path_factory.mktemp("plain") / "run", **options)
    run(recipe, cluster())
    return recipe


def after_step(watcher, step, act):
    """Let `act` happen once, in the coordinator's thread, when a step has ended."""
    due = [step]

    def look(record):
        if isinstance(record, StepRecord) and due and record.step >= due[0]:
            due.clear()
            act(record)

    watcher.on_record = look


def test_a_worker_whose_link_breaks_joins_again_by_itself_and_ends_in_order(
    tmp_path, make_recipe, cluster, run, options, undisturbed, monkeypatch
):
    runs = []

    class Watched(TrainingRun):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            runs.append(self)

    monkeypatch.setattr(training, "TrainingRun", Watched)
    recipe = make_recipe(tmp_path / "run", **options, rejoin_s=100)
    watcher = cluster()
    after_step(watcher, 4, lambda record: runs[-1].session.members.by_id[record.workers[1].worker].link.abort())
    run(recipe, watcher)
    assert_same(recipe, undisturbed)
    assert watcher.failures == {}
    (lost,) = (line for line in watcher.said if "the coordinator is lost" in line)
    assert "trying to come back" in lost
    assert sum(line.startswith("joined run") for line in watcher.said) == len(watcher.settings) + 1


def test_a_direct_link_that_breaks_is_replaced_by_the_way_through_the_coordinator(
    tmp_path, make_recipe, cluster, run, options, undisturbed, monkeypatch
):
    opened = []

    class Watched(Peers):
        def _keep(self, worker, link, carrier):
            super()._keep(worker, link, carrier)
            opened.append((asyncio.get_running_loop(), self, worker))

    monkeypatch.setattr(program, "Peers", Watched)
    recipe = make_recipe(tmp_path / "run", **options, rejoin_s=100)
    watcher = cluster()

    def cut(record):
        """The links between the first two stages, at both ends."""
        neighbours = {one.worker for one in record.workers[:2]}
        for loop, peers, worker in opened:
            if worker in neighbours:
                loop.call_soon_threadsafe(lambda peers=peers, worker=worker: abort(peers, worker, neighbours))

    def abort(peers, worker, neighbours):
        if worker in peers.links and len(neighbours) == 2:
            peers.links[worker].abort()

    after_step(watcher, 4, cut)
    run(recipe, watcher)
    assert_same(recipe, undisturbed)
    assert watcher.failures == {}
    assert any("the link to" in line for line in watcher.said)
    assert not any("the coordinator is lost" in line for line in watcher.said)
    assert [record for record in watcher.records if isinstance(record, RecoveryRecord)]


@pytest.fixture
def train(commands, model, data, tmp_path):
    """Starts `coterie train` into one folder."""

    def start(*words):
        output = tmp_path / "run"
        options = ["--model", model, "--train", data, "--output", output, "--host", "127.0.0.1"]
        options += ["--batch-rows", 4, "--micro-batches", 2, "--learning-rate", 5e-3, "--lr-schedule", "constant"]
        options += ["--heartbeat-s", 0.5, "--epochs", 1000]
        return commands("train", *options, *words), output

    return start


def link_of(command):
    for line in command.process.stdout:
        if found := re.search(r"coterie worker '(coterie://\S+)'", line):
            return found.group(1)
    raise AssertionError(command.end())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_of_a_killed_coordinator_wait_for_it_and_work_for_the_next_one(train, commands, wait_until, recorded):
    command, output = train("--workers", 2, "--min-workers", 2, "--checkpoint-every", 5, "--max-steps", 600)
    link = link_of(command)
    guests = [commands("worker", link, "--name", name, "--identity", "memory") for name in ("left", "right")]
    wait_until(lambda: len(recorded(output, "step")) > 7, "training", command, timeout_s=400)
    command.process.kill()
    command.end()
    reached = len(recorded(output, "step"))
    again, _ = train(
        "--workers", 2, "--min-workers", 2, "--checkpoint-every", 5, "--max-steps", reached + 6, "--resume"
    )
    code, out, error = again.end()
    assert code == 0, error + out
    for guest in guests:
        code, out, error = guest.end()
        assert code == 0, error + out
        assert "the coordinator is lost" in out
        assert out.count("joined run") == 2
        assert "the run is over: finished" in out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_was_frozen_is_a_spare_when_it_goes_on(train, wait_until, recorded, children_of):
    words = ("--local-worker", "name=left", "--local-worker", "name=right", "--heartbeat-timeout-s", 10)
    command, output = train(*words, "--min-workers", 2, "--max-steps", 9000)  # it is stopped long before
    wait_until(lambda: len(recorded(output, "step")) > 5, "training", command, timeout_s=400)
    frozen = psutil.Process(children_of(command.process.pid)["right"])
    frozen.suspend()
    wait_until(lambda: recorded(output, "recovery"), "a recovery", command)
    frozen.resume()
    log = output / "workers" / "worker-right.log"
    wait_until(lambda: log.read_text().count("joined run") == 2, "the second joining", command)
    command.signal(signal.SIGINT)
    code, out, error = command.end()
    assert code == 130, error + out
    assert "the coordinator is lost" in log.read_text()
    assert not any(line.startswith("error") for line in log.read_text().splitlines())
