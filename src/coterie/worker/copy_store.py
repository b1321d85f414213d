"""Copies of trained state by step and unit: few bytes in memory, more in private files, and never more than agreed."""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coterie.checkpoint.shard_file import pieces, state_digest
from coterie.logs import get_logger
from coterie.units import MIB, format_bytes

log = get_logger(__name__)

IN_MEMORY_BYTES = 16 * MIB
"""Of one store: adapters of a stage for a few steps. No plan counts with it, so more goes to the disk."""

LEFT_FREE_BYTES = 1024 * MIB
"""Of the disk: copies must not be what fills it."""


CLOCK_S = 60.0
"""How much the clock may have been set meanwhile."""


class _Copy(msgspec.Struct):
    nbytes: int
    tensors: dict[str, Tensor] | None = None
    path: Path | None = None


class CopyFolder:
    """Where copies that are too large for memory lie while a worker has a use for them; for this user only.

    Args:
        parent: One that workers of this machine may share; None: nothing is written.
    """

    def __init__(self, parent: Path | None) -> None:
        self._parent = parent
        self._folder: Path | None = None
        self._making = threading.Lock()
        if parent is not None:
            _remove_leftovers(parent)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> Path | None:
        """A new file with these tensors; None where there is no room for it."""
        if self._parent is None:
            return None
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        try:
            folder = self._made(self._parent)
            if shutil.disk_usage(folder).free - nbytes < LEFT_FREE_BYTES:
                log.info("no copy of %s is kept: the disk is nearly full", format_bytes(nbytes))
                return None
            return _write_new(folder, name, tensors)
        except OSError as error:
            log.info("no copy of %s is kept: %s", format_bytes(nbytes), error.strerror or error)
            return None

    def _made(self, parent: Path) -> Path:
        with self._making:
            if self._folder is None:
                parent.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"{os.getpid()}-"))  # mode 0700
            return self._folder

    def remove(self) -> None:
        """Nothing is kept any more."""
        with self._making:
            folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _write_new(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> Path:
    """A new file; none where that fails, as on a disk that is full by then."""
    descriptor, path = tempfile.mkstemp(dir=folder, prefix=f"{name}-")  # made with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            for piece in pieces(tensors):
                file.write(piece)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise
    return Path(path)


def _remove_leftovers(parent: Path) -> None:
    """What workers left that were killed."""
    for folder in parent.glob("*-*"):
        pid = folder.name.split("-")[0]
        if pid.isdecimal() and not _may_be_of(int(pid), folder):
            shutil.rmtree(folder, ignore_errors=True)


def _may_be_of(pid: int, folder: Path) -> bool:
    """Whether that process may have made a folder: it lives, and has not begun since the folder last changed.

    In a container all workers have the same number, one after the other.
    """
    try:
        return psutil.Process(pid).create_time() < folder.stat().st_mtime + CLOCK_S
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True


class CopyStore:
    """Copies of one origin. Every method may be called from any thread; files are written by whoever calls.

    Args:
        folder: For what does not fit into memory.
        in_memory_bytes: See `IN_MEMORY_BYTES`.
    """

    def __init__(self, folder: CopyFolder, *, in_memory_bytes: int = IN_MEMORY_BYTES) -> None:
        self._folder = folder
        self._in_memory_bytes = in_memory_bytes
        self._changing = threading.Lock()
        self._copies: dict[tuple[int, int], _Copy] = {}
        self._first_step = 0
        self._limit_bytes = 0
        self._plans = 0

    @property
    def places(self) -> set[tuple[int, int]]:
        """(step, unit) of all that is kept."""
        with self._changing:
            return set(self._copies)

    def begin(self, step: int, limit_bytes: int) -> None:
        """Another plan begins after `step` steps: only copies of that step mean anything; new ones may come."""
        with self._changing:
            self._drop([place for place in self._copies if place[0] != step])
            self._first_step, self._limit_bytes = step, limit_bytes
            self._plans += 1

    def committed(self, step: int) -> None:
        """Nobody will go back to a step before this one."""
        with self._changing:
            self._drop([place for place in self._copies if place[0] < step])
            self._first_step = max(self._first_step, step)

    def lacks(self, step: int, unit: int) -> bool:
        """Whether a copy would be new, and of use."""
        with self._changing:
            return self._limit_bytes > 0 and step >= self._first_step and (step, unit) not in self._copies

    def put(self, step: int, unit: int, tensors: Mapping[str, Tensor], *, are_own: bool = True) -> None:
        """Keep a unit's tensors after so many steps; where there is too much, what is oldest goes.

        Args:
            step: Optimizer steps done.
            unit: Which one.
            tensors: By the names that they travel under.
            are_own: Nobody else changes them, so that they may be kept as they are.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._changing:
            if not self._has_room(step, nbytes):
                return
            if are_own and self._fits_memory(nbytes):
                self._copies.setdefault((step, unit), _Copy(nbytes=nbytes, tensors=dict(tensors)))
                return
            plans = self._plans
        path = self._folder.write(f"{step}-{unit}", tensors)
        if path is None:
            return
        with self._changing:
            copy = _Copy(nbytes=nbytes, path=path)
            # Committed meanwhile, or another plan has begun, under which the same steps may end elsewhere.
            is_late = step < self._first_step or plans != self._plans
            if is_late or self._copies.setdefault((step, unit), copy) is not copy:
                _remove(copy)

    def is_quick(self, nbytes: int) -> bool:
        """Whether so much would be kept without writing a file."""
        with self._changing:
            return self._fits_memory(nbytes)

    def _fits_memory(self, nbytes: int) -> bool:
        used = sum(copy.nbytes for copy in self._copies.values() if copy.tensors is not None)
        return used + nbytes <= self._in_memory_bytes

    def _has_room(self, step: int, nbytes: int) -> bool:
        """Whether there is room, after copies of older steps have gone."""
        if step < self._first_step or nbytes > self._limit_bytes:
            return False
        while sum(copy.nbytes for copy in self._copies.values()) + nbytes > self._limit_bytes:
            oldest = min(place[0] for place in self._copies)
            if oldest >= step:
                return False
            self._drop([place for place in self._copies if place[0] == oldest])
        return True

    def find(self, step: int, unit: int, digest: str) -> dict[str, Tensor] | None:
        """A unit's tensors for a stage to train, as new ones; None if there are none with this digest."""
        with self._changing:
            copy = self._copies.get((step, unit))
        if copy is None:
            return None
        tensors = copy.tensors
        if copy.path is not None:
            tensors = _read(copy.path)
        elif tensors is not None:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if tensors is None or state_digest(tensors) != digest:
            log.warning("the copy of unit %d after %d steps is not the coordinator's state, and is dropped", unit, step)
            with self._changing:
                self._drop([(step, unit)])
            return None
        return tensors

    def clear(self) -> None:
        """Keep nothing any more."""
        with self._changing:
            self._drop(list(self._copies))
            self._limit_bytes = 0
            self._plans += 1

    def _drop(self, places: list[tuple[int, int]]) -> None:
        for place in places:
            copy = self._copies.pop(place, None)
            if copy is not None:
                _remove(copy)


def _remove(copy: _Copy) -> None:
    if copy.path is not None:
        with contextlib.suppress(OSError):
            copy.path.unlink()


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        log.info("a copy cannot be read: %s", error)
        return None
