"""A whole cluster on one machine: worker processes with budgets and speeds of their own, joining like any other."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from coterie.config.recipe import ClusterSection, LocalWorker
from coterie.errors import CoterieError, WorkerLostError
from coterie.logs import get_logger

if TYPE_CHECKING:
    from coterie.coordinator.observer import RunObserver
    from coterie.metrics.records import AnyRecord
    from coterie.metrics.sinks import Sink
    from coterie.planner.plan import Plan

log = get_logger(__name__)

JOIN_LINK_VARIABLE = "COTERIE_JOIN_LINK"
"""A local worker reads its join link here: a command line is visible to every user of the machine."""

WATCH_S = 0.2


class LocalCluster:
    """Starts worker processes and makes sure that none outlives the `with` block.

    Args:
        on_exit: Called from a thread, with name and exit code, for each worker that ends before it was told to.
    """

    def __init__(
        self,
        workers: tuple[LocalWorker, ...],
        join_link: str,
        *,
        log_folder: Path | None = None,
        on_exit: Callable[[str, int], None] = lambda _name, _code: None,
    ) -> None:
        self._workers = workers
        self._join_link = join_link
        self._on_exit = on_exit
        self._folder = log_folder or Path(tempfile.mkdtemp(prefix="coterie-workers-"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, worker in enumerate(self._workers, start=1):
            name = worker.name or f"local-{number}"
            self.processes[name] = self._start(name, worker)
        threading.Thread(target=self._watch, name="local-workers", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log_file(self, name: str) -> Path:
        """Where a worker's output goes."""
        return self._folder / f"worker-{name}.log"

    def _start(self, name: str, worker: LocalWorker) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "coterie", "worker", "--name", name, "--threads", str(worker.threads)]
        command += ["--speed", str(worker.speed), "--device", worker.device]
        if worker.memory:
            command += ["--memory", worker.memory, "--enforce-memory"]
        environment = dict(os.environ)
        environment[JOIN_LINK_VARIABLE] = self._join_link
        # Idle OpenMP threads that spin would steal the other workers' core.
        environment |= {"OMP_NUM_THREADS": str(worker.threads), "OMP_WAIT_POLICY": "passive"}
        with self.log_file(name).open("wb") as output:
            # A session of its own: Ctrl-C in the terminal reaches the coordinator, which ends its workers in order.
            return subprocess.Popen(  # noqa: S603 -- our own interpreter and arguments
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _watch(self) -> None:
        """A worker that dies before it has joined is noticed by nobody else."""
        running = dict(self.processes)
        while running and not self._stopping.wait(WATCH_S):
            for name, process in tuple(running.items()):
                if process.poll() is not None:
                    del running[name]
                    if process.returncode != 0 and not self._stopping.is_set():
                        self._on_exit(name, process.returncode)

    def stop(self, patience_s: float = 10.0) -> None:
        """End all workers: wait for those that leave by themselves, terminate, then kill. Idempotent."""
        self._stopping.set()
        deadline_s = time.monotonic() + patience_s
        for process in self.processes.values():
            try:
                process.wait(timeout=max(deadline_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                log.warning("worker process %d did not end when asked; it is killed", process.pid)
                process.kill()
                process.wait()


class LocalFront:
    """Stands between a run and its observer: writes records down first, and starts local workers when they can join.

    `end_with` is to be set to what ends the run from another thread; a local worker that dies calls it.
    """

    def __init__(
        self,
        cluster: ClusterSection,
        observer: "RunObserver",
        *,
        sinks: "Sink | None" = None,
        log_folder: Path | None = None,
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._sinks = sinks
        self._log_folder = log_folder
        self._workers: LocalCluster | None = None
        self.end_with: Callable[[CoterieError], None] = lambda _error: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            self._workers.stop()

    def joinable(self, join_link: str) -> None:
        """See `RunObserver`."""
        workers = self._cluster.effective_local_workers
        self._workers = LocalCluster(workers, join_link, log_folder=self._log_folder, on_exit=self._worker_ended)
        self._workers.__enter__()
        if not self._cluster.all_local:
            self._observer.joinable(join_link)

    def _worker_ended(self, name: str, code: int) -> None:
        assert self._workers is not None
        log_file = self._workers.log_file(name)
        self.end_with(
            WorkerLostError(
                f"the local worker {name} ended with exit code {code}{_last_error(log_file)}", hint=f"see {log_file}"
            )
        )

    def notice(self, text: str) -> None:
        """See `RunObserver`."""
        self._observer.notice(text)

    def planned(self, plan: "Plan", explanation: str, steps: int) -> None:
        """See `RunObserver`."""
        self._observer.planned(plan, explanation, steps)

    def record(self, record: "AnyRecord") -> None:
        """See `RunObserver`."""
        if self._sinks is not None:
            self._sinks.write(record)
        self._observer.record(record)


def _last_error(log_file: Path) -> str:
    """What a dead worker said last: its own error, if it could still say one."""
    try:
        lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.startswith("error [")]
    except OSError:
        return ""
    return f": {lines[-1]}" if lines else ""
