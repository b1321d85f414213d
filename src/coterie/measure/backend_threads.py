"""Backends and the threads they run in, as a measurement needs them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeVar

from coterie.backends.backend import Backend, BackendInfo

_T = TypeVar("_T")


class BackendThreads(Protocol):
    """Backends, each with the thread it runs in."""

    @property
    def infos(self) -> tuple[BackendInfo, ...]:
        """The backends, in the order in which shares are dealt out."""
        ...

    def call(self, name: str, work: Callable[[Backend], _T]) -> _T:
        """Call `work` with a backend, in its own thread, and wait."""
        ...


class OwnThreads:
    """A thread for each backend, for who has no pool. Use it as a context manager; it closes the backends."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = {backend.info.name: backend for backend in backends}
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in self._backends}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, backend in self._backends.items():
            self._threads[name].submit(backend.close).result()
            self._threads[name].shutdown()

    @property
    def infos(self) -> tuple[BackendInfo, ...]:
        """See `BackendThreads`."""
        return tuple(backend.info for backend in self._backends.values())

    def call(self, name: str, work: Callable[[Backend], _T]) -> _T:
        """See `BackendThreads`."""
        return self._threads[name].submit(work, self._backends[name]).result()
