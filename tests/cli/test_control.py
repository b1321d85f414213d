"""`coterie status`, `pause`, `continue`, `stop`, on a run that goes on meanwhile."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from coterie import api
from coterie.api import QuietObserver, RunControl
from coterie.config.loading import load_recipe
from coterie.coordinator.control_file import read_control
from coterie.errors import CoterieError, InterruptedRunError
from coterie.measure import device_profile
from coterie.transport.control_link import control_link
from coterie.transport.join_link import JoinLink
from coterie.worker.program import run_worker
from coterie.worker.settings import WorkerSettings

NAMES = ("laptop", "phone")


class Workers(QuietObserver):
    """Two workers that are threads of this process."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def joinable(self, join_link: str) -> None:
        for name in NAMES:
            thread = threading.Thread(target=self._work, args=(join_link, name), daemon=True)
            self.threads.append(thread)
            thread.start()

    @staticmethod
    def _work(join_link: str, name: str) -> None:
        asyncio.run(run_worker(JoinLink.from_text(join_link), WorkerSettings(name=name), lambda _line: None))


class LongRun:
    """A run of many steps, in a thread of its own."""

    def __init__(self, folder: Path, base_model: Path, data: Path, **options: object) -> None:
        self.folder = folder
        self.error: CoterieError | None = None
        settings = {
            "model.name": str(base_model),
            "data.train": str(data),
            "run.output": str(folder),
            "workers": 2,
            "min_workers": 2,
            "host": "127.0.0.1",
            "batch_rows": 2,
            "micro_batches": 1,
            "epochs": 4000,
            "checkpoint_every": 1000,
            "lr_schedule": "constant",
            "heartbeat_s": 0.5,
            "join_timeout_s": 200,
        }
        self.recipe = load_recipe(None, settings | options)
        self.workers = Workers()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        try:
            api.train(self.recipe, self.workers)
        except CoterieError as error:
            self.error = error

    def until(self, condition) -> None:
        """Waits for what the run does by itself."""
        deadline_s = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < deadline_s
            assert self.thread.is_alive(), self.error
            time.sleep(0.02)

    def step(self) -> int:
        return RunControl(self.folder).status().step

    def end(self) -> None:
        for thread in (self.thread, *self.workers.threads):
            thread.join(100)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def going(tmp_path_factory, base_model, data):
    """A run in its steps; it is ended by the last test, or here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_BUDGET_S": 0.01, "_MATRIX": 64, "_UPDATE_ELEMENTS": 1 << 12}.items():
            patch.setattr(device_profile, name, value)  # no plan here depends on speeds
        run = LongRun(tmp_path_factory.mktemp("runs") / "long", base_model, data)
        run.until(lambda: read_control(run.folder) is not None and run.step() >= 2)
    yield run
    if run.thread.is_alive():
        RunControl(run.folder).stop(now=True)
    run.end()


def test_status_shows_the_run_and_every_device(told, going):
    code, out, err = told("status", going.folder)
    assert (err, code) == ("", 0)
    head, figures, _, columns, *rows = out.splitlines()
    assert head.startswith("training: ")
    assert "flush" in head
    assert figures.startswith("step ")
    assert "/8000  epoch " in figures
    assert "loss " in figures
    assert figures.endswith(" left")
    assert columns.split()[:5] == ["device", "stage", "holds", "busy", "memory"]
    assert sorted(row.split()[0] for row in rows) == sorted(NAMES)
    assert "MiB" in rows[0]
    assert ("direct" in rows[0]) or ("unix" in rows[0])


def test_status_as_json_has_numbers_and_no_token(answer, going):
    code, found = answer("status", going.folder)
    assert code == 0
    assert (found["phase"], found["total_steps"], found["output"]) == ("training", 8000, str(going.folder))
    assert [device["stage"] for device in found["devices"]] == [0, 1]
    assert read_control(going.folder).token not in str(found)


def test_a_pause_holds_until_the_run_is_told_to_go_on(told, going):
    code, out, _ = told("pause", going.folder)
    assert code == 0
    assert f"paused after step {going.step()} of 8000; `coterie continue {going.folder}` goes on" in out
    before = going.step()
    assert told("pause", going.folder)[0] == 0, "a run that rests may be asked to"
    assert told("status", going.folder)[1].startswith("paused: ")
    assert going.step() == before
    code, out, _ = told("continue", going.folder)
    assert (code, out) == (0, f"going on after step {before} of 8000\n")
    going.until(lambda: going.step() > before)
    assert told("continue", going.folder)[0] == 0


def test_another_machine_needs_the_control_link(told, answer, going, monkeypatch):
    link = control_link(read_control(going.folder).endpoint)
    assert answer("status", "--link", link)[1]["phase"] == "training"
    monkeypatch.setenv("COTERIE_CONTROL_LINK", link)
    assert answer("status")[1]["phase"] == "training"
    code, _, err = told("status", "--link", link + "x")
    assert code == 32
    assert "does not know this control token" in err
    assert link.partition("#")[2] not in err
    assert told("status", going.folder, "--link", link)[0] == 2
    code, _, err = told("status", going.folder, "--show-link")
    assert code == 32
    assert "listens on this machine only" in err


def test_a_stop_makes_a_checkpoint_and_says_how_to_go_on(told, answer, going):
    code, out, err = told("stop", going.folder)
    assert (err, code) == ("", 0)
    assert "a checkpoint is made first" in out
    status = RunControl(going.folder).status()
    assert status.phase == "stopped"
    assert f"was stopped after step {status.step} of 8000" in out
    recipe = going.folder / "recipe.toml"
    assert f"`coterie train {recipe} --resume` goes on from the checkpoint of step {status.step}" in out
    going.end()
    assert isinstance(going.error, InterruptedRunError)
    assert read_control(going.folder) is None
    for verb in ("pause", "continue", "stop"):
        code, found = answer(verb, going.folder)
        assert (code, found["error"]["slug"]) == (31, "not-running")
        assert f"was stopped after step {status.step} of 8000" in found["error"]["message"]
    code, out, _ = told("status", going.folder, "--watch")
    assert code == 0
    assert out.startswith("stopped: ")
    assert out.endswith(f"\n`coterie train {recipe} --resume` goes on from the checkpoint of step {status.step}\n\n")


def test_where_no_run_is_every_verb_says_so(told, tmp_path):
    for verb in ("status", "pause", "continue", "stop"):
        code, out, err = told(verb, tmp_path / "typo")
        assert (code, out) == (30, "")
        assert "typo does not exist" in err
