"""The server's cache of activations: what devices sent once, read shuffled in every later epoch (METHODS.md 2.3).

A folder holds `layout.json` (what it was made for), `rows.bin` (the activations, a row of bytes for a selected token)
and `index.log` (a record for each batch). A batch's rows are put onto the disk before its record, so a batch is there
as a whole or not at all, whatever moment the process or the power ends. Without a folder, all is in memory.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from coterie.errors import ActivationCacheError, ProtocolError
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.cache_checks import check_shape, kind_of, same_content
from coterie.sidetuning.cache_index import BatchRecord, CollectionRecord, encode_record
from coterie.sidetuning.cache_layout import CacheLayout
from coterie.sidetuning.cache_storage import CacheStorage
from coterie.sidetuning.cached_batch import CachedBatch, CachedSample, Integers, checksum, joined_labels, record_of
from coterie.sidetuning.row_store import Rows
from coterie.units import counted, format_bytes

StepKey: TypeAlias = tuple[int, ...]
"""Under which a batch is sent, such as (step, micro-batch)."""

_INDEX_BYTES_PER_TOKEN = 64
"""What a record takes at most, in ordinary tasks, for a token: id, count, checksum, label, its share of the rest."""
_QUOTA_HINT = "raise the quota, or keep less: upload in int8 or int4, a later first layer, token selection if it is off"
_OLD_ROWS_HINT = "; activations of data that are used no more stay in the cache: another folder begins without them"


class ActivationCache:
    """Activations by sample id. One process writes; threads may read and write at the same time.

    Attributes:
        layout: What is stored.
        quota_bytes: Rows and index together never take more.
    """

    def __init__(self, layout: CacheLayout, quota_bytes: int, storage: CacheStorage) -> None:
        """Use `open`."""
        self.layout = layout
        self.quota_bytes = quota_bytes
        self._storage = storage
        self._coder = layout.coder
        self._places: dict[int, CachedSample] = {}
        self._writing = threading.RLock()
        self._unchecked: set[int] = set()
        for record in storage.index.batches:
            self._know(record)

    @classmethod
    def open(cls, folder: Path | None, layout: CacheLayout, quota_bytes: int) -> Self:
        """The cache in a folder, made if there is none; a batch that a crash left half is cut off. None: in memory.

        Raises:
            ActivationCacheError: The folder's cache was made for something else, is in use or damaged.
            StorageError: The folder cannot be written.
        """
        return cls(layout, quota_bytes, CacheStorage.open(folder, layout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, sample: int) -> bool:
        return sample in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def samples(self) -> tuple[int, ...]:
        """Ids of all samples, in the order they came."""
        return tuple(self._places)

    @property
    def used_bytes(self) -> int:
        """Bytes of rows and index together."""
        return self._storage.used_bytes

    @property
    def is_in_memory(self) -> bool:
        """Whether it has no folder."""
        return self._storage.folder is None

    def tokens_of(self, samples: Sequence[int]) -> int:
        """How many tokens of these samples are there; a sample that is absent has none."""
        return sum(self._places[sample].count for sample in samples if sample in self._places)

    def require_room(self, tokens: int, *, beside_bytes: int = 0) -> None:
        """Refuse, before anything is collected, when the activations of so many more tokens will not fit.

        Args:
            tokens: How many are to come.
            beside_bytes: What else will be written to the same disk. It is no part of the quota.

        Raises:
            ActivationCacheError: They exceed the quota.
            StorageError: The disk has too little room.
        """
        needed = self.layout.bytes_for(tokens) + tokens * _INDEX_BYTES_PER_TOKEN
        if tokens:
            self._check_quota(needed, f"{counted(tokens, 'selected token')}")
        self._storage.require_free_space(needed + beside_bytes)

    def collection(self, digest: str, samples: int) -> int:
        """The id of the first sample of some data: rows 0, 1, ... of it are that id and the following ones.

        Data that the cache knows already get the ids they had; new data get ids after all others.

        Args:
            digest: Of the encoded data.
            samples: How many rows they have.

        Raises:
            StorageError: The disk is full.
        """
        with self._writing:
            for known in self._storage.index.collections:
                if known.digest == digest and known.samples == samples:
                    return known.first_sample
            first = sum(known.samples for known in self._storage.index.collections)
            self._storage.append(CollectionRecord(digest=digest, first_sample=first, samples=samples))
            return first

    def put(self, batch: ActivationBatch, step_key: StepKey) -> None:
        """Keep a batch; samples that are there already must have the same content and are left as they are.

        Raises:
            ActivationCacheError: The quota is full, or a sample is there with other content.
            ModelError: An activation is not finite.
            ProtocolError: The batch has other layers or another width than the cache, or a sample twice.
            StorageError: The disk is full; the cache stays as it was.
        """
        check_shape(batch, self.layout)
        with self._writing:
            self._put(batch, step_key)

    def read(self, samples: Sequence[int] | Tensor) -> ActivationBatch:
        """The activations of some samples, in the given order.

        What is read for the first time since the cache was opened is compared with its checksum.

        Raises:
            ActivationCacheError: A sample is absent or damaged.
        """
        ids = samples.tolist() if isinstance(samples, Tensor) else list(samples)
        places = self._find(ids)
        counts = np.array([place.count for place in places], np.int64)
        ends = counts.cumsum()
        starts = ends - counts
        rows = self._take(places, counts, starts)
        labels, loss_index = joined_labels(places, starts)
        return ActivationBatch(
            samples=torch.tensor(ids, dtype=torch.int64),
            counts=torch.from_numpy(counts),
            layers=self.layout.layers,
            taps=self._coder.decode(torch.from_numpy(rows)),
            labels=labels,
            loss_index=loss_index,
        )

    def verify(self) -> None:
        """Compare every sample with its checksum.

        Raises:
            ActivationCacheError: Some are damaged; the message names them.
        """
        damaged = []
        for place in tuple(self._places.values()):
            rows = self._storage.rows.take(np.arange(place.first_row, place.first_row + place.count))
            if checksum(rows) != place.checksum:
                damaged.append(place.sample)
        if damaged:
            raise self._damage(damaged)

    def close(self) -> None:
        """Let go of the folder."""
        with self._writing:
            self._storage.close()

    def _put(self, batch: ActivationBatch, step_key: StepKey) -> None:
        ids = batch.samples.tolist()
        known = [number for number, sample in enumerate(ids) if sample in self._places]
        if known:
            self._compare(batch.pick(known), step_key)
            new = [number for number, sample in enumerate(ids) if sample not in self._places]
            batch = batch.pick(new)
        if not batch.rows:
            return
        self._check_kind(batch, step_key)
        rows = self._coder.encode(batch.taps).numpy()
        record = record_of(batch, rows, self._storage.rows.rows, step_key)
        needed = rows.nbytes + len(encode_record(record))
        self._check_quota(needed, f"{counted(batch.rows, 'sample')} of step {step_key}")
        self._storage.append(record, rows)
        self._know(record)

    def _know(self, record: BatchRecord) -> None:
        places = {place.sample: place for place in CachedBatch(record).places()}
        if self._storage.folder is not None:
            self._unchecked.update(places)
        self._places.update(places)

    def _check_kind(self, batch: ActivationBatch, step_key: StepKey) -> None:
        if self._places:
            there, here = kind_of(self.read([next(iter(self._places))])), kind_of(batch)
            if here != there:
                raise ProtocolError(f"step {step_key} has {here}; what the cache holds has {there}")

    def _check_quota(self, needed_bytes: int, what: str) -> None:
        if self.used_bytes + needed_bytes > self.quota_bytes:
            raise ActivationCacheError(
                f"the activations of {what} need {format_bytes(needed_bytes)}; of the cache's quota of "
                f"{format_bytes(self.quota_bytes)}, {format_bytes(self.used_bytes)} are used",
                hint=f"{_QUOTA_HINT}{_OLD_ROWS_HINT if self._places else ''}",
            )

    def _compare(self, given: ActivationBatch, step_key: StepKey) -> None:
        """Samples that are in the cache already must say the same again."""
        stored = self.read(given.samples)
        given = msgspec.structs.replace(given, taps=self._coder.decode(self._coder.encode(given.taps)))
        if not same_content(stored, given):
            raise ActivationCacheError(
                f"step {step_key} brings samples {given.samples.tolist()} again, with other content than the cache has",
                hint="a backbone must give the same activations each time: it has to be in evaluation mode, with the "
                "same rows in a batch; collect only samples that the cache lacks",
            )

    def _find(self, samples: Sequence[int]) -> list[CachedSample]:
        try:
            return [self._places[sample] for sample in samples]
        except KeyError as error:
            raise ActivationCacheError(
                f"sample {error} is not among the {len(self._places)} of the cache", hint="collect it first"
            ) from None

    def _take(self, places: Sequence[CachedSample], counts: Integers, starts: Integers) -> Rows:
        """Rows of some samples, one after the other; checked if they have not been yet."""
        index = np.array([place.first_row for place in places], np.int64)
        if (counts != 1).any():
            index = np.repeat(index - starts, counts) + np.arange(counts.sum())
        rows = self._storage.rows.take(index)
        if self._unchecked:
            damaged = []
            for place, start in zip(places, starts, strict=True):
                if place.sample in self._unchecked and checksum(rows[start : start + place.count]) != place.checksum:
                    damaged.append(place.sample)
            if damaged:
                raise self._damage(damaged)
            self._unchecked.difference_update(place.sample for place in places)
        return rows

    def _damage(self, samples: Sequence[int]) -> ActivationCacheError:
        named = ", ".join(map(str, samples[:5])) + (", ..." if len(samples) > 5 else "")
        return ActivationCacheError(
            f"{counted(len(samples), 'sample')} of the cache in {self._storage.folder or 'memory'} changed since they "
            f"were written: {named}",
            hint="restore the folder from a copy, or delete it and collect again",
        )
