"""A whole cluster on one machine: worker processes with budgets and speeds of their own, joining like any other."""

import contextlib
import itertools
import os
import re
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
from coterie.errors import CoterieError, InterruptedRunError, WorkerLostError, error_from_slug
from coterie.logs import get_logger
from coterie.transport.user_settings import IN_MEMORY

if TYPE_CHECKING:
    from coterie.coordinator.observer import RunObserver
    from coterie.metrics.records import AnyRecord
    from coterie.metrics.sinks import Sink
    from coterie.planner.plan import Plan

log = get_logger(__name__)

JOIN_LINK_VARIABLE = "COTERIE_JOIN_LINK"
"""A local worker reads its join link here: a command line is visible to every user of the machine."""

PARENT_VARIABLE = "COTERIE_PARENT"
"""A local worker reads here which process is its coordinator: when that is killed, the worker does not wait for it."""

WATCH_S = 0.2

LEAVE_S = 10.0
"""How long workers may take to leave when the run is over; a worker in the middle of a forward ends it first."""

HURRY_S = 3.0
"""The same when the user has stopped the run."""

TERMINATE_S = 5.0

SIGKILL = 9
"""Windows has no name for it, and no such exit code."""


class LocalCluster:
    """Starts worker processes and makes sure that none outlives the `with` block.

    Args:
        on_exit: Called from a thread, with name and exit code, for each worker that ends before it was told to.
        cache_folder: Where a server keeps what it must not lose.
    """

    def __init__(
        self,
        workers: tuple[LocalWorker, ...],
        join_link: str,
        *,
        log_folder: Path | None = None,
        on_exit: Callable[[str, int], None] = lambda _name, _code: None,
        cache_folder: Path | None = None,
    ) -> None:
        self._workers = workers
        self._cache_folder = cache_folder
        self._join_link = join_link
        self._on_exit = on_exit
        self._folder = log_folder or Path(tempfile.mkdtemp(prefix="coterie-workers-"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, worker in zip(_names(self._workers), self._workers, strict=True):
            self.processes[name] = self._start(name, worker)
        threading.Thread(target=self._watch, name="local-workers", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log_file(self, name: str) -> Path:
        """Where a worker's output goes."""
        plain = re.sub(r"[^\w.-]", "-", name)
        return self._folder / f"worker-{plain}.log"

    def _start(self, name: str, worker: LocalWorker) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "coterie", "worker", f"--name={name}", "--threads", str(worker.threads)]
        command += ["--speed", str(worker.speed), "--device", worker.device, "--backends", worker.backends]
        # The model is on this disk: nothing of it is worth keeping twice.
        command += ["--identity", IN_MEMORY, "--shard-cache", "off"]
        # All of them live on one battery, whose owner has started the run here: moving layers among them saves nothing.
        command += ["--battery", "none"]
        command += ["--no-keep-awake"] if self.processes else []
        if worker.role == "server":
            command += ["--role", "server"]
            command += [] if self._cache_folder is None else [f"--cache-folder={self._cache_folder}"]
        if worker.memory:
            command += ["--memory", worker.memory, "--enforce-memory"]
        environment = dict(os.environ)
        environment[JOIN_LINK_VARIABLE] = self._join_link
        environment[PARENT_VARIABLE] = str(os.getpid())
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

    def stop(self, patience_s: float = LEAVE_S) -> None:
        """End all workers: wait for those that leave by themselves, terminate, then kill. Idempotent."""
        self._stopping.set()
        try:
            self._wait(patience_s)
            for process in self.processes.values():
                process.terminate()
            self._wait(TERMINATE_S)
        finally:  # also if somebody is impatient and asks once more to stop
            for process in self.processes.values():
                if process.poll() is None:
                    log.warning("worker process %d did not end when asked; it is killed", process.pid)
                    process.kill()
                    process.wait()

    def _wait(self, seconds: float) -> None:
        """Until all processes have ended, at most `seconds`."""
        deadline_s = time.monotonic() + seconds
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline_s - time.monotonic(), 0.0))


def _names(workers: tuple[LocalWorker, ...]) -> list[str]:
    """A name for each worker; those that were given none get the free ones among `local-1`, `local-2`."""
    given = {worker.name for worker in workers}
    free = (name for number in itertools.count(1) if (name := f"local-{number}") not in given)
    return [worker.name or next(free) for worker in workers]


class LocalFront:
    """Stands between a run and its observer: writes records down first, and starts local workers when they can join.

    `end_with` is to be set to what ends the run from another thread. A local worker's process that ends is told to
    `worker_ended`, by the worker's name; where that is not set, it ends the run. `own_link` makes of a join link the
    one that local workers use.
    """

    def __init__(
        self,
        cluster: ClusterSection,
        observer: "RunObserver",
        *,
        sinks: "Sink | None" = None,
        log_folder: Path | None = None,
        cache_folder: Path | None = None,
    ) -> None:
        self._cluster = cluster
        self._cache_folder = cache_folder
        self._observer = observer
        self._sinks = sinks
        self._log_folder = log_folder
        self._workers: LocalCluster | None = None
        self.end_with: Callable[[CoterieError], None] = lambda _error: None
        self.worker_ended: Callable[[str, CoterieError], None] = lambda _name, error: self.end_with(error)
        self.own_link: Callable[[str], str] = lambda join_link: join_link

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            self._workers.stop(HURRY_S if isinstance(error, InterruptedRunError | KeyboardInterrupt) else LEAVE_S)

    def joinable(self, join_link: str) -> None:
        """See `RunObserver`."""
        workers = self._cluster.effective_local_workers
        self._workers = LocalCluster(
            workers,
            self.own_link(join_link),
            log_folder=self._log_folder,
            on_exit=self._worker_ended,
            cache_folder=self._cache_folder,
        )
        self._workers.__enter__()
        if not self._cluster.all_local:
            self._observer.joinable(join_link)

    def _worker_ended(self, name: str, code: int) -> None:
        assert self._workers is not None
        self.worker_ended(name, _death(name, code, self._workers.log_file(name)))

    def notice(self, text: str) -> None:
        """See `RunObserver`."""
        self._observer.notice(text)

    def planned(self, plan: "Plan", explanation: str, steps: int) -> None:
        """See `RunObserver`."""
        self._observer.planned(plan, explanation, steps)

    def advanced(self, what: str, done: int, total: int) -> None:
        """See `RunObserver`."""
        self._observer.advanced(what, done, total)

    def record(self, record: "AnyRecord") -> None:
        """See `RunObserver`."""
        if self._sinks is not None:
            self._sinks.write(record)
        self._observer.record(record)


def _death(name: str, code: int, log_file: Path) -> CoterieError:
    """Why a worker's process ended: its own last error if it could still say one, else how it ended."""
    try:
        _, said, last = ("\n" + log_file.read_text(errors="replace")).rpartition("\nerror [")
    except OSError:
        said = last = ""
    if said:
        slug, _, text = last.strip().partition("]: ")
        message, _, hint = text.partition("\ntry: ")
        return error_from_slug(slug, f"the local worker {name} ended: {message}", hint or f"see {log_file}")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    memory = "; if the system killed it for its memory, give it a smaller budget" if code == -SIGKILL else ""
    return WorkerLostError(f"the local worker {name} {how}", hint=f"see {log_file}{memory}")
