"""A whole cluster on one machine: worker processes with budgets and speeds of their own, joining like any other."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from coterie.config.recipe import LocalWorker
from coterie.logs import get_logger

log = get_logger(__name__)

JOIN_LINK_VARIABLE = "COTERIE_JOIN_LINK"
"""A local worker reads its join link here: a command line is visible to every user of the machine."""


class LocalCluster:
    """Starts worker processes and makes sure that none outlives the `with` block."""

    def __init__(self, workers: tuple[LocalWorker, ...], join_link: str, *, log_folder: Path | None = None) -> None:
        self._workers = workers
        self._join_link = join_link
        self._folder = log_folder or Path(tempfile.mkdtemp(prefix="coterie-workers-"))
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, worker in enumerate(self._workers, start=1):
            self.processes.append(self._start(worker.name or f"local-{number}", worker))
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

    def stop(self, patience_s: float = 10.0) -> None:
        """End all workers: wait for those that leave by themselves, terminate, then kill. Idempotent."""
        for process in self.processes:
            try:
                process.wait(timeout=patience_s if process is self.processes[0] else 1.0)
            except subprocess.TimeoutExpired:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                log.warning("worker process %d did not end when asked; it is killed", process.pid)
                process.kill()
                process.wait()
