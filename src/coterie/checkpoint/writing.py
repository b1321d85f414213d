"""Writing one checkpoint: units in any order, then all of it at once or not at all."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from torch import Tensor

from coterie.checkpoint.durable import publish_folder, remove_folder, storage_errors, sync_folder, write_file
from coterie.checkpoint.manifest import Manifest, ShardEntry, encode_manifest
from coterie.checkpoint.reading import MANIFEST, Checkpoint
from coterie.checkpoint.shard_file import (
    OptimizerState,
    Shapes,
    check_tensors,
    found_in,
    found_in_file,
    join_state,
    largest_file_bytes,
    pieces,
    write_pieces,
)
from coterie.errors import CheckpointError, ProtocolError, StorageError
from coterie.transport.frame import Buffer


class CheckpointWriter:
    """Collects units in a `.partial` folder and gives it its name at `commit`.

    Used as a context manager, it deletes what was written when the block ends without a commit. Units may come from
    several threads; they are written one after the other, so memory holds one at a time.
    """

    def __init__(
        self,
        partial: Path,
        *,
        step: int,
        units: Mapping[int, Shapes],
        needed_bytes: int,
        committed: Callable[[Checkpoint], None],
    ) -> None:
        self.step = step
        self._partial = partial
        self._units = units
        self._needed_bytes = needed_bytes
        self._committed = committed
        self._entries: dict[int, ShardEntry] = {}
        self._lock = threading.Lock()
        self._done = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._done:
            self.abort()

    @property
    def missing_units(self) -> tuple[int, ...]:
        """Units that have not been written yet."""
        return tuple(sorted(set(self._units) - set(self._entries)))

    def write_unit(self, unit: int, parameters: Mapping[str, Tensor], optimizer_state: OptimizerState) -> None:
        """Write one unit's trained parameters and the optimizer's tensors for them; a second time replaces the first.

        Raises:
            ProtocolError: They are not the parameters that the unit must have, or have another shape.
            StorageError: The disk is full; the checkpoint is given up and the previous one stays.
        """
        tensors = join_state(parameters, optimizer_state)
        check_tensors(unit, found_in(tensors), self._expected(unit))
        self._keep(unit, pieces(tensors), check_file=False)

    def write_unit_bytes(self, unit: int, data: Buffer | Iterable[Buffer]) -> None:
        """Keep one unit's safetensors file as it was received, whole or in pieces, once it has been checked.

        Raises:
            ProtocolError: It is too large, not a safetensors file, or holds other tensors than the unit must have.
            StorageError: The disk is full; the checkpoint is given up and the previous one stays.
        """
        parts = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
        self._keep(unit, parts, check_file=True)

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Make the checkpoint valid, then delete older ones beyond those to keep. `manifest.shards` is filled in here.

        Raises:
            CheckpointError: Units are missing, or the manifest names another step.
            StorageError: The disk is full; the checkpoint is given up and the previous one stays.
        """
        self._check_open()
        if self.missing_units:
            raise CheckpointError(f"the checkpoint of step {self.step} lacks units {list(self.missing_units)}")
        if manifest.global_step != self.step:
            raise CheckpointError(f"step {manifest.global_step} cannot be saved as a checkpoint of step {self.step}")
        final = self._partial.with_suffix("")
        with self._lock, self._giving_up_on_error():
            shards = tuple(self._entries[unit] for unit in sorted(self._entries))
            manifest = msgspec.structs.replace(manifest, shards=shards)
            sync_folder(self._partial)
            write_file(self._partial / MANIFEST, encode_manifest(manifest))
            sync_folder(self._partial)
            publish_folder(self._partial, final)
            self._done = True
        checkpoint = Checkpoint(final, manifest)
        self._committed(checkpoint)
        return checkpoint

    def abort(self) -> None:
        """Give up: delete what was written. The checkpoints before stay as they are."""
        self._done = True
        remove_folder(self._partial)

    def _keep(self, unit: int, data: Iterable[Buffer], *, check_file: bool) -> None:
        """Write a file under a temporary name, check it if it came from outside, and only then let it replace."""
        expected = self._expected(unit)
        path = self._partial / f"unit-{unit:03d}.safetensors"
        temporary = path.with_suffix(".tmp")
        with self._lock, self._giving_up_on_error():
            try:
                sha256, nbytes = write_pieces(temporary, data, largest_file_bytes(expected))
                if check_file:
                    check_tensors(unit, found_in_file(temporary), expected)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            temporary.replace(path)
            self._entries[unit] = ShardEntry(
                unit=unit, file=path.name, sha256=sha256, nbytes=nbytes, parameters=tuple(expected)
            )

    def _expected(self, unit: int) -> Shapes:
        self._check_open()
        if unit not in self._units:
            raise ProtocolError(f"unit {unit} is not among the units {sorted(self._units)} of this checkpoint")
        return self._units[unit]

    def _check_open(self) -> None:
        if self._done:
            raise CheckpointError(f"the checkpoint of step {self.step} was committed or given up already")

    @contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        """Name a file system's error, and free the room that a half-written checkpoint takes."""
        try:
            with storage_errors(self._partial.parent, self._needed_bytes):
                yield
        except StorageError:
            self.abort()
            raise
