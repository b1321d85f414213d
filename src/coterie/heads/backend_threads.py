"""Which thread calls which backend: one of its own, or that of whoever waits for all of them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from coterie.backends.torch_backend import PROCESSOR

_T = TypeVar("_T")


class BackendThreads:
    """A long-lived thread for each backend; torch on the processor computes in the caller's.

    While a thread is woken, its processor idles: a fraction of a millisecond, some milliseconds on a busy virtual
    machine, twice for each layer. Whoever waits for the backends can compute one's share meanwhile.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in names if name != PROCESSOR}
        self._callers = threading.RLock()  # one at a time, as in a thread: who closes a pool waits for who computes
        for thread in self._threads.values():
            thread.submit(int)  # begins it: where profiles are kept the first job comes under an enforced memory limit

    def submit(self, name: str, work: Callable[..., _T], *args: Any) -> "Future[_T]":
        """Begin work with a backend; in the caller's thread it has been done when this returns."""
        if name in self._threads:
            return self._threads[name].submit(work, *args)
        future: Future[_T] = Future()
        try:
            with self._callers:
                result = work(*args)
            future.set_result(result)
        except Exception as error:  # a thread would keep it for whoever asks for the result
            future.set_exception(error)
        return future

    def all_of(self, calls: Sequence[tuple[str, "Callable[[], Future[_T] | None]"]]) -> "list[Future[_T] | None]":
        """Make calls that each begin a backend's work, the caller's own last, and wait for all; in the calls' order."""
        found: dict[int, Future[_T] | None] = {}
        for index in sorted(range(len(calls)), key=lambda index: calls[index][0] == PROCESSOR):
            found[index] = calls[index][1]()
        wait([future for future in found.values() if future is not None])
        return [found[index] for index in range(len(calls))]

    def beside(self, work: Callable[[], _T]) -> "Future[_T]":
        """Begin other work in a backend's thread, while all are idle: another might not start under a memory limit."""
        return self.submit(next(iter(self._threads), PROCESSOR), work)

    def end(self, name: str) -> None:
        """End a backend's thread when its work is done. Idempotent."""
        if name in self._threads:
            self._threads[name].shutdown()
