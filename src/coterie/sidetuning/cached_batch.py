"""One batch as the cache's index knows it: where each sample's rows are, and its labels."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.cache_index import ArrayRecord, BatchRecord
from coterie.sidetuning.row_store import Rows

Array = NDArray[np.generic]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CachedSample:
    """Where one sample is: its batch and number there, its rows, and its part of the batch's labels."""

    sample: int
    batch: "CachedBatch"
    number: int
    first_row: int
    count: int
    loss_start: int
    loss_stop: int

    @property
    def checksum(self) -> int:
        """CRC-32 of the sample's rows."""
        return int(self.batch.checksums[self.number])


class CachedBatch:
    """A batch record, ready to be looked into.

    Attributes:
        labels: Of the tokens that enter the loss (M, ...), if known.
        loss_offsets: Of these tokens, their numbers among their sample's own rows (M,); None if all do.
        checksums: CRC-32 of each sample's rows (B,).
    """

    def __init__(self, record: BatchRecord) -> None:
        self._first_row = record.first_row
        self._samples = _array(record.samples)
        self._counts = _integers(record.counts)
        self.checksums = _integers(record.checksums)
        self.labels = None if record.labels is None else _array(record.labels)
        self.loss_offsets: Integers | None = None
        ends = self._counts.cumsum()
        self._loss_ends = ends
        if record.loss_index is not None:
            index = _integers(record.loss_index)
            self._loss_ends = np.searchsorted(index, ends).astype(np.int64)
            starts = ends - self._counts
            self.loss_offsets = index - np.repeat(starts, np.diff(self._loss_ends, prepend=0))

    def places(self) -> Iterator[CachedSample]:
        """Where every sample is."""
        row, loss_start = self._first_row, 0
        ends = self._loss_ends.tolist()
        for number, (sample, count) in enumerate(zip(self._samples.tolist(), self._counts.tolist(), strict=True)):
            yield CachedSample(sample, self, number, row, count, loss_start, ends[number])
            row, loss_start = row + count, ends[number]


def record_of(batch: ActivationBatch, rows: Rows, first_row: int, step_key: tuple[int, ...]) -> BatchRecord:
    """The record of a batch whose positions were encoded as `rows` [N, bytes] and will lie from `first_row` on."""
    ends = torch.cumsum(batch.counts, 0).tolist()
    starts = [0, *ends[:-1]]
    checksums = [checksum(rows[start:end]) for start, end in zip(starts, ends, strict=True)]
    return BatchRecord(
        step_key=step_key,
        first_row=first_row,
        rows=len(rows),
        samples=_record(batch.samples.numpy()),
        counts=_record(batch.counts.numpy()),
        checksums=_record(np.array(checksums, np.int64)),
        labels=None if batch.labels is None else _record(batch.labels.numpy()),
        loss_index=None if batch.loss_index is None else _record(batch.loss_index.numpy()),
    )


def checksum(rows: Rows) -> int:
    """CRC-32 of rows [N, bytes] that follow one another in memory."""
    return zlib.crc32(rows.data)


def joined_labels(samples: Sequence[CachedSample], first_tokens: Integers) -> tuple[Tensor | None, Tensor | None]:
    """Labels (M, ...) and loss index (M,) of a batch of these samples, in which their rows start at `first_tokens`."""
    labels, moved = [], []
    for sample, first in zip(samples, first_tokens, strict=True):
        part = slice(sample.loss_start, sample.loss_stop)
        if sample.batch.labels is not None:
            labels.append(sample.batch.labels[part])
        if sample.batch.loss_offsets is not None:
            moved.append(sample.batch.loss_offsets[part] + first)
    return (
        torch.from_numpy(np.concatenate(labels)) if labels else None,
        torch.from_numpy(np.concatenate(moved)) if moved else None,
    )


def _record(array: Array) -> ArrayRecord:
    return ArrayRecord(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())


def _array(record: ArrayRecord) -> Array:
    return np.frombuffer(record.data, record.dtype).reshape(record.shape)


def _integers(record: ArrayRecord) -> Integers:
    return np.frombuffer(record.data, np.int64).reshape(record.shape)
