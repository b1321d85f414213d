"""How a program of a test bed is started: as a process of its own, or forked from one that has imported everything."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1", "COLUMNS": "4000"}
POLL_S = 0.02


class Running(Protocol):
    """A process that was started."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it); None while it runs."""
        ...


Launch = Callable[[list[str], dict[str, str], Path], Running]
"""Starts `coterie WORDS` with further environment; its output is added to a file."""


def launch(words: list[str], environment: dict[str, str], log: Path, *, prefix: tuple[str, ...] = ()) -> Running:
    """Start `python -m coterie WORDS`, behind the words of `prefix`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "coterie", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET, **environment},
            start_new_session=True,
        )


class Nursery:
    """Forks programs from a process that has imported what they need: a tenth of the time, the same main function."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("nursery_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **QUIET},
        )

    def launch(self, words: list[str], environment: dict[str, str], log: Path) -> Running:
        """See `Launch`."""
        answer = self._ask(do="start", words=words, environment=environment, log=str(log))
        return _Child(answer["pid"], self)

    def code_of(self, pid: int) -> int | None:
        """How one of its programs ended."""
        return self._ask(do="look", pid=pid).get("code")

    def close(self) -> None:
        """End it, and programs that still run."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, **wish: object) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


class _Child:
    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self._nursery = nursery
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._nursery.code_of(self.pid)
        return self._code


def wait_for_end(running: Running, timeout_s: float) -> int:
    """Wait until a process ends.

    Raises:
        TimeoutError: It does not.
    """
    deadline_s = time.monotonic() + timeout_s
    while (code := running.poll()) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"process {running.pid} still runs after {timeout_s:.0f} s")
        time.sleep(POLL_S)
    return code


def send(running: Running, number: signal.Signals) -> None:
    """Send a signal, unless it has ended."""
    if running.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, number)
