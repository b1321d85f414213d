"""Sources that ask another program: read now and then by a thread, so that nobody waits for them."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Reading = TypeVar("Reading")


class InBackground(Generic[Reading]):
    """The latest reading of a slow source; `None` until there is one.

    The thread is a daemon: a program that hangs keeps no worker from ending.
    """

    def __init__(self, read: Callable[[], Reading | None], *, every_s: float, name: str) -> None:
        self._read = read
        self._every_s = every_s
        self._latest: Reading | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def latest(self) -> Reading | None:
        """What was read last."""
        return self._latest

    def close(self) -> None:
        """Read no more; what is being read is not waited for."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._latest = self._read()
            self._ending.wait(self._every_s)
