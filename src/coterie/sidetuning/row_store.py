"""Where a cache's rows lie: in a mapped file, or in blocks of memory. Rows are added and read, never changed."""

import mmap
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.checkpoint.durable import sync_file
from coterie.errors import ActivationCacheError
from coterie.units import MIB, format_bytes

Rows = NDArray[np.uint8]


class RowStore(Protocol):
    """Rows of equal length, numbered from 0 in the order they were added."""

    rows: int

    def append(self, rows: Rows) -> None:
        """Add rows [N, `row_bytes`]; when this returns they are as safe as the store makes them.

        Raises:
            OSError: The file system refuses; the store is as it was.
        """

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Copies of the rows with these numbers [N, `row_bytes`]; from any thread."""

    def truncate(self, rows: int) -> None:
        """Forget the rows from number `rows` on, before anyone has read them."""

    def close(self) -> None:
        """Let go of file and memory."""


class MemoryRows:
    """Rows in blocks of memory: nothing is moved when there are more."""

    def __init__(self, row_bytes: int, block_bytes: int = 64 * MIB) -> None:
        self.rows = 0
        self._row_bytes = row_bytes
        self._block_rows = max(1, block_bytes // row_bytes)
        self._blocks: list[Rows] = []

    def append(self, rows: Rows) -> None:
        """Add rows; see `RowStore`."""
        while len(rows):
            block, within = divmod(self.rows, self._block_rows)
            if block == len(self._blocks):
                self._blocks.append(np.empty((self._block_rows, self._row_bytes), np.uint8))
            fitting = rows[: self._block_rows - within]
            self._blocks[block][within : within + len(fitting)] = fitting
            self.rows += len(fitting)
            rows = rows[len(fitting) :]

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Copies of rows; see `RowStore`."""
        if len(self._blocks) == 1:
            return _gathered(self._blocks[0], index)
        taken = np.empty((len(index), self._row_bytes), np.uint8)
        blocks, within = np.divmod(index, self._block_rows)
        for block in np.unique(blocks):
            here = blocks == block
            taken[here] = self._blocks[block][within[here]]
        return taken

    def truncate(self, rows: int) -> None:
        """Forget rows; see `RowStore`."""
        self.rows = rows
        del self._blocks[-(-rows // self._block_rows) :]

    def close(self) -> None:
        """Let go of the memory."""
        self._blocks.clear()


class FileRows:
    """Rows in one file, one after the other without anything between.

    Args:
        path: The file; made if it does not exist.
        row_bytes: Bytes of a row.
        rows: How many rows the index knows; what comes after them was never finished and is cut off.

    Raises:
        ActivationCacheError: The file is shorter than the rows that the index knows.
    """

    def __init__(self, path: Path, row_bytes: int, rows: int) -> None:
        path.touch()
        self.rows = rows
        self._row_bytes = row_bytes
        self._file = path.open("r+b", buffering=0)
        self._mapped: Rows = np.empty((0, row_bytes), np.uint8)
        size = path.stat().st_size
        if size < rows * row_bytes:
            self._file.close()
            raise ActivationCacheError(
                f"{path} is {format_bytes(rows * row_bytes - size)} shorter than the {format_bytes(rows * row_bytes)} "
                "that its index knows",
                hint="restore the folder from a copy, or delete it and collect again",
            )
        if size > rows * row_bytes:
            self.truncate(rows)

    def append(self, rows: Rows) -> None:
        """Add rows and put them onto the disk; see `RowStore`."""
        try:
            self._file.seek(self.rows * self._row_bytes)
            view = np.ascontiguousarray(rows).reshape(-1).data
            while view.nbytes:  # an unbuffered write may stop early, at 2 GiB or at a full disk
                view = view[self._file.write(view) :]
            sync_file(self._file.fileno())
        except OSError:
            self.truncate(self.rows)
            raise
        self.rows += len(rows)

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Copies of rows; see `RowStore`."""
        mapped = self._mapped
        if len(index) and int(index.max()) >= len(mapped):
            mapped = self._mapped = self._map()
        return _gathered(mapped, index)

    def truncate(self, rows: int) -> None:
        """Forget rows; see `RowStore`."""
        self.rows = rows
        self._file.truncate(rows * self._row_bytes)

    def close(self) -> None:
        """Let go of the file; its pages are let go with the last array over them."""
        self._mapped = np.empty((0, self._row_bytes), np.uint8)
        self._file.close()

    def _map(self) -> Rows:
        """The file as it is now; an older map stays valid for whoever still reads it."""
        rows = self.rows  # once: a writer may add some meanwhile
        whole = mmap.mmap(self._file.fileno(), rows * self._row_bytes, access=mmap.ACCESS_READ)
        return np.frombuffer(whole, np.uint8).reshape(rows, self._row_bytes)


def _gathered(source: Rows, index: NDArray[np.int64]) -> Rows:
    """Rows of `source` by number, one copy each."""
    taken = np.empty((len(index), source.shape[1]), np.uint8)
    # Into memory of its own `take` copies straight only in this mode; every index is in range.
    np.take(source, index, axis=0, out=taken, mode="clip")
    return taken
