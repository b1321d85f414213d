"""Blocks of shared memory between a parent and the process that hosts its backend, reused by size.

A block's name is taken away as soon as both sides have it open: what has no name cannot outlive them, however they end.
Until then Python's resource tracker knows of it.
"""

import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from coterie.errors import BackendError

LEAST_BYTES = 1 << 16
MEMORY_FILES = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory, not a place for temporary files


class Blocks:
    """The parent's blocks."""

    def __init__(self) -> None:
        self._all: dict[str, SharedMemory] = {}
        self._free: dict[int, list[str]] = {}
        self._sizes: dict[str, int] = {}
        self._unopened: list[str] = []

    def take(self, size_bytes: int) -> str:
        """The name of a block with at least this size.

        Raises:
            BackendError: The system has no more shared memory.
        """
        size_bytes = _rounded(size_bytes)
        free = self._free.setdefault(size_bytes, [])
        if free:
            return free.pop()
        try:
            block = SharedMemory(create=True, size=size_bytes)
        except OSError as error:
            raise _too_little(size_bytes) from error
        self._all[block.name] = block
        self._sizes[block.name] = size_bytes
        self._unopened.append(block.name)
        _reserve(block, size_bytes)
        return block.name

    def give_back(self, name: str) -> None:
        """Let a block be used again."""
        self._free[self._sizes[name]].append(name)

    def memory(self, name: str) -> memoryview:
        """A block's bytes; views of them must be gone before `close`."""
        memory = self._all[name].buf
        assert memory is not None
        return memory

    def unopened(self) -> tuple[str, ...]:
        """Blocks that the child has not opened yet."""
        return tuple(self._unopened)

    def opened(self) -> None:
        """The child has opened them: nobody needs their names any more."""
        for name in self._unopened:
            self._all[name].unlink()
        self._unopened.clear()

    def close(self) -> None:
        """Give all back. Idempotent."""
        self.opened()
        for block in self._all.values():
            block.close()
        self._all.clear()
        self._free.clear()


def _rounded(size_bytes: int) -> int:
    """A size in steps of a quarter of a power of two, so that few sizes occur."""
    step = max(LEAST_BYTES, (1 << size_bytes.bit_length()) // 8)
    return -(-max(size_bytes, 1) // step) * step


def _reserve(block: SharedMemory, size_bytes: int) -> None:
    """Take the pages now: on Linux a full /dev/shm ends whoever writes into pages that it does not have."""
    path = MEMORY_FILES / block.name
    if not path.exists():
        return
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        raise _too_little(size_bytes) from error


def _too_little(size_bytes: int) -> BackendError:
    return BackendError(
        f"there is no shared memory for another {size_bytes / 1e6:.0f} MB between a backend's process and this one",
        hint="give the container more (`docker run --shm-size`), or leave the backend out",
    )
