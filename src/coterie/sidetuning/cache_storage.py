"""A cache's rows and their index together: in a folder that one process holds, or in memory."""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from coterie.checkpoint.durable import check_free_space, storage_errors, sync_folder
from coterie.errors import ActivationCacheError
from coterie.sidetuning.cache_index import CacheIndex, Record, encode_record
from coterie.sidetuning.cache_layout import CacheLayout, settle_layout
from coterie.sidetuning.row_store import FileRows, MemoryRows, Rows, RowStore
from coterie.units import format_bytes

ROWS = "rows.bin"
INDEX = "index.log"
LOCK = "cache.lock"


class CacheStorage:
    """Rows and index; a record is written after its rows, so what the index knows is there.

    Attributes:
        folder: Where they are; None in memory.
        rows: The rows.
        index: The index.
    """

    def __init__(
        self, folder: Path | None, rows: RowStore, index: CacheIndex, row_bytes: int, lock: FileLock | None
    ) -> None:
        """Use `open`."""
        self.folder = folder
        self.rows = rows
        self.index = index
        self._row_bytes = row_bytes
        self._lock = lock

    @classmethod
    def open(cls, folder: Path | None, layout: CacheLayout) -> Self:
        """What is in the folder, made if there is none; what a crash left half is cut off.

        Raises:
            ActivationCacheError: The folder's cache was made for something else, is in use or damaged.
            StorageError: The folder cannot be written.
        """
        row_bytes = layout.coder.row_bytes
        if folder is None:
            return cls(None, MemoryRows(row_bytes), CacheIndex(None), row_bytes, None)
        with storage_errors(folder, 0), ExitStack() as undo:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _locked(folder)
            undo.callback(lock.release)
            settle_layout(folder, layout)
            _refuse_rows_alone(folder)
            index = CacheIndex(folder / INDEX)
            undo.callback(index.close)
            rows = FileRows(folder / ROWS, row_bytes, index.rows)
            undo.callback(rows.close)
            sync_folder(folder)
            undo.pop_all()
        return cls(folder, rows, index, row_bytes, lock)

    @property
    def used_bytes(self) -> int:
        """Bytes of rows and index."""
        return self.rows.rows * self._row_bytes + self.index.size_bytes

    def require_free_space(self, needed_bytes: int) -> None:
        """Refuse when the folder's disk has fewer bytes free.

        Raises:
            StorageError: Too little is free.
        """
        if self.folder is not None:
            check_free_space(self.folder, needed_bytes)

    def append(self, record: Record, rows: Rows | None = None) -> None:
        """Add the rows of a record [N, bytes], if it has any, then the record.

        Raises:
            StorageError: The disk is full; all is as it was.
        """
        encoded = encode_record(record)
        before = self.rows.rows
        needed = len(encoded) + (0 if rows is None else rows.nbytes)
        with storage_errors(self.folder or Path(), needed):
            if rows is not None:
                self.rows.append(rows)
            try:
                self.index.append(record, encoded)
            except OSError:
                self.rows.truncate(before)
                raise

    def close(self) -> None:
        """Let go of files, memory and folder."""
        self.index.close()
        self.rows.close()
        if self._lock is not None:
            self._lock.release()


def _refuse_rows_alone(folder: Path) -> None:
    """No crash leaves rows without an index, which is made first: without it, all rows would be cut off as unfinished.

    Raises:
        ActivationCacheError: The index is not there.
    """
    rows = folder / ROWS
    if rows.exists() and rows.stat().st_size and not (folder / INDEX).exists():
        raise ActivationCacheError(
            f"{folder} has {format_bytes(rows.stat().st_size)} of activations in {ROWS}, and no {INDEX} that says "
            "whose they are",
            hint="restore the file from a copy, or delete the folder and collect again",
        )


def _locked(folder: Path) -> FileLock:
    """The folder's lock, which the system takes back when the process ends, however it ends."""
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise ActivationCacheError(
            f"another process is using the cache in {folder}", hint="wait for it or stop it, or choose another folder"
        ) from None
    return lock
