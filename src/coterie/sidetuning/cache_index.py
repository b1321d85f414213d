"""The index of a cache: a log of records, each with its length and checksum, of which a crash can only tear the last.

A record is written after the rows that it speaks of have reached the disk. So what the log says is there, is there; and
rows beyond its last record belong to a batch that was never finished.
"""

import zlib
from pathlib import Path

import msgspec

from coterie.checkpoint.durable import sync_file
from coterie.errors import ActivationCacheError
from coterie.logs import get_logger

_HEAD_BYTES = 12
"""Length and CRC-32 of what follows and the CRC-32 of these two, all little-endian."""

_log = get_logger(__name__)


class ArrayRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A small array: NumPy's name of its type, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, tag="batch", array_like=True):
    """Samples that were stored together: all of them are in the cache, or none.

    Attributes:
        step_key: Under which they were sent.
        first_row: Where their rows start; they follow one another.
        rows: How many they are together.
        samples: Their ids, int64 (B,).
        counts: Rows of each, int64 (B,).
        checksums: CRC-32 of each one's rows, int64 (B,).
        labels: Of the tokens that enter the loss (M, ...), if known.
        loss_index: Which of the batch's rows enter the loss, int64 (M,); all of them if None.
    """

    step_key: tuple[int, ...]
    first_row: int
    rows: int
    samples: ArrayRecord
    counts: ArrayRecord
    checksums: ArrayRecord
    labels: ArrayRecord | None
    loss_index: ArrayRecord | None


class CollectionRecord(msgspec.Struct, frozen=True, kw_only=True, tag="collection", array_like=True):
    """Data whose samples are collected: their digest, and the ids set aside for them."""

    digest: str
    first_sample: int
    samples: int


Record = BatchRecord | CollectionRecord


class CacheIndex:
    """The log in a file, or nowhere for a cache in memory.

    Args:
        path: The file; made if it does not exist. A torn last record is cut off.

    Raises:
        ActivationCacheError: It is damaged in a way that no crash explains.
    """

    def __init__(self, path: Path | None) -> None:
        self.records: list[Record] = []
        self.size_bytes = 0
        self._file = None
        if path is None:
            return
        path.touch()
        data = path.read_bytes()
        self.size_bytes = self._read(path, data)
        self._file = path.open("r+b", buffering=0)
        if self.size_bytes < len(data):
            _log.warning("%s: cut off %d bytes of an unfinished record", path, len(data) - self.size_bytes)
            self._truncate()

    @property
    def batches(self) -> list[BatchRecord]:
        """The batches, in the order they came."""
        return [record for record in self.records if isinstance(record, BatchRecord)]

    @property
    def collections(self) -> list[CollectionRecord]:
        """The collections, in the order they came."""
        return [record for record in self.records if isinstance(record, CollectionRecord)]

    @property
    def rows(self) -> int:
        """How many rows the batches have together; they follow one another."""
        last = next((record for record in reversed(self.records) if isinstance(record, BatchRecord)), None)
        return 0 if last is None else last.first_row + last.rows

    def append(self, record: Record, encoded: bytes) -> None:
        """Add a record, as `encode_record` made it; when this returns it is on the disk.

        Raises:
            OSError: The file system refuses; the log is as it was.
        """
        if self._file is not None:
            try:
                self._file.seek(self.size_bytes)
                view = memoryview(encoded)
                while view.nbytes:  # an unbuffered write may stop early at a full disk
                    view = view[self._file.write(view) :]
                sync_file(self._file.fileno())
            except OSError:
                self._truncate()
                raise
        self.records.append(record)
        self.size_bytes += len(encoded)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, path: Path, data: bytes) -> int:
        """Take all whole records; returns where they end."""
        at = 0
        while at < len(data):
            head = data[at : at + _HEAD_BYTES]
            length = int.from_bytes(head[:4], "little")
            body = data[at + _HEAD_BYTES : at + _HEAD_BYTES + length]
            if head != _head(body):
                self._refuse_if_damaged(path, data, at)
                break
            try:
                self.records.append(msgspec.msgpack.decode(body, type=Record))
            except msgspec.DecodeError as error:
                raise ActivationCacheError(
                    f"{path} holds a record at byte {at} that this version does not understand: {error}",
                    hint="use the version of coterie that made the cache, or collect again in another folder",
                ) from error
            at += _HEAD_BYTES + length
        return at

    def _refuse_if_damaged(self, path: Path, data: bytes, at: int) -> None:
        """A crash tears the last record only: it ends early, or zeros stand where the disk had no time."""
        head = data[at : at + _HEAD_BYTES]
        is_head = zlib.crc32(head[:8]) == int.from_bytes(head[8:], "little")
        stop = at + _HEAD_BYTES + (int.from_bytes(head[:4], "little") if is_head else 0)
        if not any(data[stop:]):
            return
        raise ActivationCacheError(
            f"{path} is damaged at byte {at} of {len(data)}: {len(self.records)} records before it are whole, those "
            "after it cannot be trusted",
            hint="restore the folder from a copy, or delete it and collect again",
        )

    def _truncate(self) -> None:
        assert self._file is not None
        self._file.truncate(self.size_bytes)
        sync_file(self._file.fileno())


def encode_record(record: Record) -> bytes:
    """A record's bytes in the log."""
    body = msgspec.msgpack.encode(record)
    return _head(body) + body


def _head(body: bytes) -> bytes:
    both = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
    return both + zlib.crc32(both).to_bytes(4, "little")
