"""CPU seconds of the slowest of several backends at work at once: what an emulated device is slowed by."""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from coterie.backends.backend import BackendInfo
from coterie.backends.torch_backend import PROCESSOR

_OWN_THREAD = (PROCESSOR, "numpy")
"""Backends that compute in the thread that calls them, as long as they have one."""


class JobTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend's work took: wall seconds, and CPU seconds of the thread that called it."""

    wall_s: float
    cpu_s: float


class Lead:
    """Adds up, over all calls of a pool, the CPU seconds that the caller waited for the slowest backend.

    A backend of the processor that computes in threads of its driver's own is given what the process used beside the
    threads that are known; several share it equally. One in another process or on another device has its wall time.

    Args:
        infos: The backends.
        hosted: Names of those in processes of their own.
        process_cpu_s: CPU seconds of this process so far.
    """

    def __init__(
        self,
        infos: Sequence[BackendInfo],
        hosted: frozenset[str] = frozenset(),
        process_cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self.cpu_s = 0.0
        self._by_wall = {info.name for info in infos if info.kind != "cpu"} | hosted
        self._own_thread = {info.name for info in infos if info.name in _OWN_THREAD}
        self._process_cpu_s = process_cpu_s
        self._start_s = 0.0

    def begin(self) -> None:
        """Backends are about to be called."""
        self._start_s = self._process_cpu_s()

    def end(self, times: Mapping[str, JobTime]) -> None:
        """All have answered.

        Args:
            times: Of each that was called.
        """
        beside_s = max(self._process_cpu_s() - self._start_s - sum(one.cpu_s for one in times.values()), 0.0)
        foreign = [name for name in times if name not in self._by_wall and name not in self._own_thread]
        slowest_s = max(
            (
                one.wall_s
                if name in self._by_wall
                else one.cpu_s + (beside_s / len(foreign) if name in foreign else 0.0)
                for name, one in times.items()
            ),
            default=0.0,
        )
        own = times.get(PROCESSOR)  # in the caller's thread (`BackendThreads`): who counts its time has counted this
        self.cpu_s += slowest_s - (own.cpu_s if own is not None else 0.0)
