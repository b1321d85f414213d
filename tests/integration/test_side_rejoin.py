"""A device or server of a side-tuning run that is lost and comes back: the run goes on by itself, to the same bits."""

import asyncio
import re

import pytest
import torch
from safetensors.torch import load_file

from coterie.errors import WorkerLostError
from coterie.metrics.records import FaultRecord, StartRecord, StepRecord
from coterie.worker import program
from coterie.worker.settings import WorkerSettings
from coterie.worker.side_server import SideServer

STEPS = 45
STEPS_PER_EPOCH = 9
COLLECTING, REPLAYING = 3, 23
"""Steps at which something is lost."""
OPTIONS = {
    "mode": "side",
    "workers": 2,
    "min_workers": 1,
    "epochs": 5,
    "evaluate_every_epoch": False,
    "learning_rate": 5e-3,
    "rank": 8,
    "checkpoint_every": 5,
    "rejoin_s": 100,
}
LINK = re.compile(r"coterie worker '(coterie://\S+)'")
PHONE = WorkerSettings(name="phone")


def trained_in(folder):
    parts = ("side_network", "task_layers")
    return {name: tensor for part in parts for name, tensor in load_file(folder / f"{part}.safetensors").items()}


def assert_equal(some, others):
    assert some.keys() == others.keys()
    assert [name for name, tensor in some.items() if not torch.equal(tensor, others[name])] == []


def after_steps(watcher, *events):
    """Let each act happen once, in the coordinator's thread, when its step has ended."""
    due = list(events)

    def look(record):
        if isinstance(record, StepRecord) and due and record.step >= due[0][0]:
            due.pop(0)[1]()

    watcher.on_record = look


def starts(watcher):
    """From which steps the server went on."""
    return [record.first_step for record in watcher.records if isinstance(record, StartRecord)]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_recipe, cluster, run):
    """What is trained if nothing goes wrong."""
    watcher = cluster(PHONE, WorkerSettings(name="server", role="server"))
    result = run(make_recipe(tmp_path_factory.mktemp("unharmed") / "run", **OPTIONS), watcher)
    return trained_in(result.model_folder)


@pytest.fixture
def server(tmp_path):
    """One that keeps its cache and its state."""
    return WorkerSettings(name="server", role="server", cache_folder=tmp_path / "kept")


@pytest.fixture
def workers(monkeypatch):
    """By name the last worker's program, the loop it runs in, and its task."""
    found = {}

    class Watched(program.WorkerProgram):
        def __init__(self, settings, say):
            super().__init__(settings, say)
            found[settings.name] = (self, asyncio.get_running_loop(), asyncio.current_task())

    monkeypatch.setattr(program, "WorkerProgram", Watched)
    return found


@pytest.fixture
def cut(workers):
    """Breaks a worker's link to the coordinator, from the worker's end."""
    return lambda name: workers[name][1].call_soon_threadsafe(workers[name][0]._visit._link.abort)


@pytest.fixture
def kill(workers, monkeypatch):
    """Ends a worker as a kill does it: it says no word, and what it has not saved before is lost."""
    monkeypatch.setattr(SideServer, "_save_last", lambda _self: None)

    def end(name):
        worker, loop, task = workers[name]

        def here():
            worker._visit._link.abort()
            task.cancel()

        loop.call_soon_threadsafe(here)

    return end


def test_a_device_that_is_killed_while_it_collects_and_started_again_collects_the_rest(
    tmp_path, make_recipe, cluster, run, unharmed, server, kill
):
    watcher = cluster(PHONE, server)

    def kill_and_start():
        kill("phone")
        watcher.start(PHONE)

    after_steps(watcher, (COLLECTING, kill_and_start))
    result = run(make_recipe(tmp_path / "run", **OPTIONS), watcher)
    assert_equal(trained_in(result.model_folder), unharmed)
    assert [notice for notice in watcher.notices if "waiting for phone" in notice]
    assert 0 < result.summary.side.device_passes < 1  # since it came back
    assert len(starts(watcher)) == 2
    assert list(watcher.failures) == ["phone"]  # the one that was killed


def test_a_server_that_is_killed_while_it_replays_and_started_again_needs_no_device(
    tmp_path, make_recipe, cluster, run, unharmed, server, kill
):
    watcher = cluster(PHONE, server)

    def kill_and_start():
        kill("server")
        watcher.start(server)

    after_steps(watcher, (REPLAYING, kill_and_start))
    result = run(make_recipe(tmp_path / "run", **OPTIONS), watcher)
    assert_equal(trained_in(result.model_folder), unharmed)
    assert result.summary.side.device_passes == 0
    first, again = starts(watcher)
    assert first == 0
    assert 2 * STEPS_PER_EPOCH <= again < STEPS - STEPS_PER_EPOCH
    assert [record.slug for record in watcher.records if isinstance(record, FaultRecord)] == ["worker-lost"]


@pytest.mark.parametrize("name", ["phone", "server"])
def test_a_link_that_is_cut_while_two_devices_collect_is_dialled_again(
    tmp_path, make_recipe, cluster, run, unharmed, server, cut, name
):
    watcher = cluster(PHONE, WorkerSettings(name="tablet"), server)
    after_steps(watcher, (COLLECTING, lambda: cut(name)))
    options = OPTIONS | {"workers": 3, "min_workers": 2, "cuts": [2]}
    result = run(make_recipe(tmp_path / "run", **options), watcher)
    assert_equal(trained_in(result.model_folder), unharmed)
    assert watcher.failures == {}
    assert sum(line.startswith("joined run") for line in watcher.said) >= 6  # whoever was not lost begins again, too
    assert len(starts(watcher)) == 2


def test_a_device_that_does_not_come_back_in_time_ends_the_run_which_can_be_resumed(
    tmp_path, make_recipe, cluster, run, unharmed, server, kill
):
    watcher = cluster(PHONE, server)
    after_steps(watcher, (COLLECTING, lambda: kill("phone")))
    with pytest.raises(WorkerLostError, match="phone is gone") as ended:
        # Long enough for the server, which has to dial again: before, it frees its memory, a second on a busy machine.
        run(make_recipe(tmp_path / "run", **OPTIONS | {"rejoin_s": 6}), watcher)
    assert "continue with --resume" in ended.value.hint
    assert list(watcher.failures) == ["phone"]  # the server was told that the run is over
    result = run(make_recipe(tmp_path / "run", resume=True, **OPTIONS), cluster(PHONE, server))
    assert_equal(trained_in(result.model_folder), unharmed)


def test_a_server_that_took_its_cache_with_it_is_not_waited_for(tmp_path, make_recipe, cluster, run, kill):
    watcher = cluster(PHONE, WorkerSettings(name="server", role="server"))
    after_steps(watcher, (REPLAYING, lambda: kill("server")))
    with pytest.raises(WorkerLostError, match="server is gone"):
        run(make_recipe(tmp_path / "run", **OPTIONS), watcher)
    assert not [notice for notice in watcher.notices if "waiting for server" in notice]


@pytest.mark.slow
@pytest.mark.timeout(900)  # four starts of a process, on a machine that may have much else to do
def test_processes_that_are_killed_and_started_again_by_their_owners_go_on(
    tmp_path, make_recipe, cluster, run, unharmed, commands
):
    class Processes(cluster):
        def joinable(self, join_link):
            self.join_link = join_link
            self.last = {name: self.process(name) for name in ("phone", "server")}

        def process(self, name):
            words = ["--role", "server", "--cache-folder", tmp_path / "kept"] if name == "server" else []
            words += ["--name", name, "--identity", tmp_path / f"{name}.identity", "--threads", 1]
            return commands("worker", self.join_link, *words)

        def kill_and_start(self, name):
            self.last[name].kill()
            self.last[name] = self.process(name)

    watcher = Processes()
    after_steps(
        watcher,
        (COLLECTING, lambda: watcher.kill_and_start("phone")),
        (REPLAYING, lambda: watcher.kill_and_start("server")),
    )
    result = run(make_recipe(tmp_path / "run", **OPTIONS), watcher)
    assert_equal(trained_in(result.model_folder), unharmed)
    assert len(starts(watcher)) == 3
    for command in watcher.last.values():
        code, out, error = command.end()
        assert code == 0, error + out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_of_a_killed_coordinator_wait_for_it_and_go_on_with_the_next_one(
    tmp_path, model, data, commands, wait_until, recorded, unharmed
):
    words = ["train", "--mode", "side", "--model", model, "--train", data, "--output", tmp_path / "run"]
    words += ["--workers", 2, "--host", "127.0.0.1", "--batch-rows", 4, "--micro-batches", 2, "--epochs", 5]
    words += ["--learning-rate", "5e-3", "--side-rank", 8, "--checkpoint-every", 5, "--no-evaluate-every-epoch"]
    first = commands(*words)
    link = next(found.group(1) for line in first.process.stdout if (found := LINK.search(line)))
    guests = [
        commands("worker", link, "--name", name, "--identity", "memory", "--threads", 1, "--speed", 0.2, *options)
        for name, options in (("phone", []), ("server", ["--role", "server", "--cache-folder", tmp_path / "kept"]))
    ]
    wait_until(lambda: len(recorded(tmp_path / "run", "step")) > COLLECTING, "training", first, timeout_s=400)
    first.kill()
    again = commands(*words, "--resume")
    for command in (again, *guests):
        code, out, error = command.end(timeout_s=400)
        assert code == 0, error + out
    assert_equal(trained_in(tmp_path / "run" / "model"), unharmed)
