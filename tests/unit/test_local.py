"""Worker processes of one machine: started quietly, ended for certain, and their last words understood."""

import os
import sys
import threading

import pytest

from coterie import local
from coterie.config.recipe import LocalWorker
from coterie.errors import OutOfMemoryError, WorkerLostError
from coterie.local import JOIN_LINK_VARIABLE, LocalCluster, LocalFront

LINK = "coterie://127.0.0.1:1/?fp=" + "a" * 64 + "#not-a-real-token"


@pytest.fixture
def as_worker(tmp_path, monkeypatch):
    """Lets a few lines of Python stand in for the worker program, whose start takes seconds."""

    def use(program):
        script = tmp_path / "worker"
        script.write_text(f"#!{sys.executable}\n{program}\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    return use


@pytest.fixture
def ended():
    """Collects who ended, and lets a test wait for it."""

    class Ended(list):
        def __init__(self):
            super().__init__()
            self.first = threading.Event()

        def __call__(self, name, code):
            self.append((name, code))
            self.first.set()

    return Ended()


def test_the_join_link_travels_in_the_environment_not_on_the_command_line(tmp_path, as_worker):
    as_worker(
        "import os, sys\n"
        f"print(os.environ['{JOIN_LINK_VARIABLE}'].endswith('token'), 'token' in ' '.join(sys.argv), sys.argv[1:])\n"
    )
    workers = (LocalWorker(name="board", memory="600MiB", speed=0.5, threads=2, backends="torch+opencl"),)
    with LocalCluster(workers, LINK, log_folder=tmp_path / "logs") as cluster:
        cluster.processes["board"].wait(100)
        said = cluster.log_file("board").read_text()
    assert said.startswith("True False")
    for words in (
        "'--name=board'", "'--memory', '600MiB', '--enforce-memory'", "'--speed', '0.5'", "'--backends', 'torch+opencl'"
    ):  # fmt: skip
        assert words in said


def test_a_worker_that_ends_badly_is_reported_with_its_exit_code(tmp_path, as_worker, ended):
    as_worker("raise SystemExit(7)")
    with LocalCluster((LocalWorker(),), LINK, log_folder=tmp_path, on_exit=ended):
        assert ended.first.wait(100)
    assert ended == [("local-1", 7)]


def test_a_worker_that_ends_well_is_not_reported(tmp_path, as_worker, ended):
    as_worker("pass")
    with LocalCluster((LocalWorker(),), LINK, log_folder=tmp_path, on_exit=ended) as cluster:
        cluster.processes["local-1"].wait(100)
        ended.first.wait(3 * local.WATCH_S)
    assert not ended


@pytest.mark.parametrize(("name", "terminate_s", "code"), [("polite", 100.0, -15), ("stubborn", 0.3, -9)])
def test_a_worker_that_does_not_leave_is_terminated_and_one_that_ignores_that_is_killed(
    name, terminate_s, code, tmp_path, as_worker, monkeypatch
):
    monkeypatch.setattr(local, "TERMINATE_S", terminate_s)
    as_worker(
        "import signal, sys, time\n"
        "if '--name=stubborn' in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with LocalCluster((LocalWorker(name=name),), LINK, log_folder=tmp_path) as cluster:
        waiting = threading.Event()
        while not cluster.log_file(name).read_text():
            waiting.wait(0.02)
        cluster.stop(patience_s=0.1)
    assert cluster.processes[name].returncode == code


def test_an_impatient_user_leaves_no_worker_behind(tmp_path, as_worker, monkeypatch):
    as_worker("import time; time.sleep(600)")

    def interrupted(_self, _seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalCluster, "_wait", interrupted)
    cluster = LocalCluster((LocalWorker(),), LINK, log_folder=tmp_path)
    with pytest.raises(KeyboardInterrupt), cluster:
        pass
    assert cluster.processes["local-1"].poll() is not None


def test_a_workers_last_error_keeps_its_kind_and_hint(tmp_path):
    log = tmp_path / "worker-board.log"
    log.write_text(
        "joined run 1 as board\nerror [network]: an earlier one\nerror [out-of-memory]: memory ran out\n"
        "on stage 1\ntry: more micro-batches\n"
    )
    error = local._death("board", 14, log)
    assert isinstance(error, OutOfMemoryError)
    assert error.message == "the local worker board ended: memory ran out\non stage 1"
    assert error.hint == "more micro-batches"


def test_a_worker_without_last_words_is_lost(tmp_path):
    killed = local._death("board", -9, tmp_path / "no-such.log")
    assert isinstance(killed, WorkerLostError)
    assert killed.message == "the local worker board was killed by signal 9"
    assert "smaller budget" in killed.hint
    assert local._death("board", 1, tmp_path / "no-such.log").message == "the local worker board ended with exit code 1"


def test_workers_without_a_name_get_one_that_nobody_has(tmp_path, as_worker):
    as_worker("pass")
    workers = (LocalWorker(name="local-2"), LocalWorker(), LocalWorker())
    with LocalCluster(workers, LINK, log_folder=tmp_path) as cluster:
        assert list(cluster.processes) == ["local-2", "local-1", "local-3"]


def test_a_name_is_never_a_path_or_a_flag(tmp_path, as_worker):
    as_worker("import sys; print(sys.argv[4])")
    with LocalCluster((LocalWorker(name="--../my laptop"),), LINK, log_folder=tmp_path / "logs") as cluster:
        cluster.processes["--../my laptop"].wait(100)
        (log,) = (tmp_path / "logs").iterdir()
        assert log.read_text() == "--name=--../my laptop\n"


def test_a_front_without_workers_has_nothing_to_end():
    with LocalFront(None, None) as front:
        front.end_with(WorkerLostError("nobody listens"))


def test_the_users_own_environment_does_not_reach_the_threads_of_a_worker(tmp_path, as_worker, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "64")
    as_worker("import os; print(os.environ['OMP_NUM_THREADS'])")
    with LocalCluster((LocalWorker(threads=2),), LINK, log_folder=tmp_path) as cluster:
        cluster.processes["local-1"].wait(100)
        assert cluster.log_file("local-1").read_text() == "2\n"
