"""Ways to keep batches of activations and to read single rows back: the cache, and three that could stand in its place.

All keep the same float16 numbers and give the same float32 batch. Each is written so that a batch is on the disk before
the next one comes.
"""

import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coterie.jobs.side_spec import UploadDtype
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.cache_layout import CacheLayout

QUOTA_BYTES = 1 << 40


class Store(ABC):
    """One way, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def put(self, batch: ActivationBatch) -> None:
        """Keep a batch."""

    @abstractmethod
    def read(self, samples: Sequence[int]) -> Tensor:
        """Activations of some rows, float32 (N, L, D)."""

    @abstractmethod
    def reopen(self) -> None:
        """Let go of what is open and held in memory, and go on with what is in the folder."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def files(self) -> list[Path]:
        """All files that hold the activations."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


class CacheStore(Store):
    """`ActivationCache`, in a folder or in memory."""

    def __init__(self, folder: Path, layout: CacheLayout, *, in_memory: bool = False) -> None:
        super().__init__(folder)
        self._layout = layout
        self._place = None if in_memory else folder
        self._cache = ActivationCache.open(self._place, layout, QUOTA_BYTES)

    def put(self, batch: ActivationBatch) -> None:
        self._cache.put(batch, (int(batch.samples[0]),))

    def read(self, samples: Sequence[int]) -> Tensor:
        return self._cache.read(samples).taps

    def reopen(self) -> None:
        if self._place is not None:
            self._cache.close()
            self._cache = ActivationCache.open(self._place, self._layout, QUOTA_BYTES)

    def close(self) -> None:
        self._cache.close()


class SafetensorsStore(Store):
    """A safetensors file for each batch; a row is a slice of its file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._places: dict[int, tuple[Path, int, int]] = {}

    def put(self, batch: ActivationBatch) -> None:
        path = self.folder / f"{int(batch.samples[0]):08d}.safetensors"
        save_file({"taps": batch.taps.half(), "labels": batch.labels}, path)
        sync(path)
        ends = batch.counts.cumsum(0).tolist()
        for sample, start, end in zip(batch.samples.tolist(), [0, *ends], ends, strict=False):
            self._places[sample] = (path, start, end)

    def read(self, samples: Sequence[int]) -> Tensor:
        parts = []
        for sample in samples:
            path, start, end = self._places[sample]
            with safe_open(path, framework="pt") as file:
                parts.append(file.get_slice("taps")[start:end])
        return torch.cat(parts).float()

    def reopen(self) -> None:
        """Nothing is open between two reads."""

    def close(self) -> None:
        """Nothing is open between two reads."""


class MemmapStore(Store):
    """One file of numbers as a NumPy memmap, and the rows' places in memory: no record of what is whole."""

    def __init__(self, folder: Path, layers: int, width: int) -> None:
        super().__init__(folder)
        self._shape = (layers, width)
        self._path = folder / "taps.f16"
        self._path.touch()
        self._places: dict[int, tuple[int, int]] = {}
        self._rows = 0
        self._mapped: np.memmap | None = None

    def put(self, batch: ActivationBatch) -> None:
        with self._path.open("ab") as file:
            file.write(batch.taps.half().numpy().data)
        sync(self._path)
        ends = (batch.counts.cumsum(0) + self._rows).tolist()
        for sample, start, end in zip(batch.samples.tolist(), [self._rows, *ends], ends, strict=False):
            self._places[sample] = (start, end)
        self._rows += batch.tokens

    def read(self, samples: Sequence[int]) -> Tensor:
        if self._mapped is None:
            self._mapped = np.memmap(self._path, np.float16, "r", shape=(self._rows, *self._shape))
        index = np.concatenate([np.arange(*self._places[sample]) for sample in samples])
        return torch.from_numpy(self._mapped[index]).float()

    def reopen(self) -> None:
        self._mapped = None

    def close(self) -> None:
        self._mapped = None


class SqliteStore(Store):
    """A blob for each row in SQLite, a transaction for each batch."""

    def __init__(self, folder: Path, layers: int, width: int) -> None:
        super().__init__(folder)
        self._shape = (-1, layers, width)
        self._open()
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("CREATE TABLE IF NOT EXISTS row (sample INTEGER PRIMARY KEY, labels BLOB, taps BLOB)")

    def put(self, batch: ActivationBatch) -> None:
        taps, labels = batch.taps.half().numpy(), batch.labels.numpy()
        ends = batch.counts.cumsum(0).tolist()
        rows = [
            (sample, labels[start:end].tobytes(), taps[start:end].tobytes())
            for sample, start, end in zip(batch.samples.tolist(), [0, *ends], ends, strict=False)
        ]
        with self._database:
            self._database.executemany("INSERT INTO row VALUES (?, ?, ?)", rows)

    def read(self, samples: Sequence[int]) -> Tensor:
        parts = []
        for sample in samples:
            labels, taps = self._database.execute("SELECT labels, taps FROM row WHERE sample = ?", (sample,)).fetchone()
            np.frombuffer(labels, np.int64)
            parts.append(np.frombuffer(taps, np.float16).reshape(self._shape))
        return torch.from_numpy(np.concatenate(parts)).float()

    def reopen(self) -> None:
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._database.close()
        self._open()

    def close(self) -> None:
        self._database.close()

    def _open(self) -> None:
        self._database = sqlite3.connect(self.folder / "rows.sqlite")


def layout_of(layers: int, width: int, dtype: UploadDtype) -> CacheLayout:
    """A cache's layout over all layers."""
    return CacheLayout(layers=tuple(range(1, layers + 1)), width=width, dtype=dtype, key={})


def sync(path: Path) -> None:
    """Put a file's bytes onto the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_memory(files: Sequence[Path]) -> bool:
    """Ask the system to forget what it holds of some files, so that they come from the disk; can it be asked?"""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        sync(path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True
