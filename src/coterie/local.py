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
from typing import Self

from coterie.config.recipe import LocalWorker
from coterie.logs import get_logger

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
