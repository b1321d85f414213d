"""A whole checkpoint, read unit by unit or name by name: any cut reads what any other cut wrote."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from coterie.checkpoint.manifest import Manifest, ShardEntry, decode_manifest
from coterie.checkpoint.shard_file import hash_file, split_key
from coterie.checkpoint.trained_state import UnitState
from coterie.errors import CheckpointError

MANIFEST = "manifest.json"


class Checkpoint:
    """One complete checkpoint folder."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._shards = {shard.unit: shard for shard in manifest.shards}

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest.global_step

    @property
    def unit_of(self) -> Mapping[str, int]:
        """See `TrainedState`."""
        return self.manifest.unit_of

    @property
    def units(self) -> tuple[int, ...]:
        """Units that have a shard, in order."""
        return tuple(sorted(self._shards))

    def unit_path(self, unit: int) -> Path:
        """The unit's safetensors file, to send its bytes as they are.

        Raises:
            CheckpointError: The checkpoint has no such unit.
        """
        return self.folder / self._shard(unit).file

    def read_unit(self, unit: int) -> UnitState:
        """The state of one unit: copies in memory, independent of the file.

        Raises:
            CheckpointError: The checkpoint has no such unit.
        """
        return self._read(self._shard(unit), None)

    def read(self, names: Collection[str]) -> UnitState:
        """The state of the parameters in `names`, wherever they are; only their tensors are read.

        Raises:
            CheckpointError: A name is in no shard.
        """
        unit_of = self.manifest.unit_of
        unknown = sorted(set(names) - set(unit_of))
        if unknown:
            raise CheckpointError(
                f"the checkpoint of step {self.step} holds no {', '.join(unknown[:5])} ({len(unknown)} missing)",
                hint="it was written for another model or with other parameters trained",
            )
        parameters: dict[str, Tensor] = {}
        optimizer_state: dict[str, dict[str, Tensor]] = {}
        for unit in sorted({unit_of[name] for name in names}):
            some, state = self._read(self._shard(unit), frozenset(names))
            parameters.update(some)
            optimizer_state.update(state)
        return parameters, optimizer_state

    def parameters(self, names: Collection[str]) -> dict[str, Tensor]:
        """The parameters in `names` without their optimizer state.

        Raises:
            CheckpointError: A name is in no shard.
        """
        unit_of = self.manifest.unit_of
        found: dict[str, Tensor] = {}
        for unit in sorted({unit_of[name] for name in names if name in unit_of}):
            with _open_shard(self.unit_path(unit)) as file:
                for name in (name for name in names if unit_of.get(name) == unit):
                    found[name] = file.get_tensor(f"param/{name}")
        if len(found) < len(set(names)):
            self.read(names)  # raises, naming what is missing
        return found

    def _shard(self, unit: int) -> ShardEntry:
        shard = self._shards.get(unit)
        if shard is None:
            raise CheckpointError(f"the checkpoint of step {self.step} has no unit {unit}; it has {list(self.units)}")
        return shard

    def _read(self, shard: ShardEntry, names: frozenset[str] | None) -> UnitState:
        # In the manifest's order, which is the order they were given in: optimizers number parameters by order.
        parameters: dict[str, Tensor] = {}
        optimizer_state: dict[str, dict[str, Tensor]] = {}
        with _open_shard(self.folder / shard.file) as file:
            fields = _fields_by_name(file.keys())
            for name in shard.parameters:
                if names is not None and name not in names:
                    continue
                parameters[name] = file.get_tensor(f"param/{name}")
                if name in fields:
                    optimizer_state[name] = {field: file.get_tensor(f"optim/{name}/{field}") for field in fields[name]}
        return parameters, optimizer_state


def _open_shard(path: Path) -> safe_open:
    """A shard, read piece by piece: a mapped file would count against a memory limit, and change under the reader."""
    return safe_open(path, framework="pt", backend="pread")


def _fields_by_name(keys: Iterable[str]) -> dict[str, list[str]]:
    """Parameter name to its optimizer fields, sorted."""
    fields: dict[str, list[str]] = {}
    for key in sorted(keys):
        name, field = split_key(key)
        if field is not None:
            fields.setdefault(name, []).append(field)
    return fields


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        NewerFormatError: A newer version of this program wrote it.
        CheckpointError: It is absent or damaged.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder.name}: no readable {MANIFEST}: {error.strerror or error}") from error
    return decode_manifest(data)


def open_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """Open one checkpoint folder; `verify` reads every byte once to compare the hashes.

    Raises:
        NewerFormatError: A newer version of this program wrote it.
        CheckpointError: It is damaged; the message names the file and what is wrong with it.
    """
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        path = folder / shard.file
        try:
            nbytes = path.stat().st_size
            if nbytes != shard.nbytes:
                raise CheckpointError(f"{folder.name}: {shard.file} has {nbytes} bytes instead of {shard.nbytes}")
            if verify and hash_file(path) != shard.sha256:
                raise CheckpointError(f"{folder.name}: the hash of {shard.file} does not match")
        except OSError as error:
            raise CheckpointError(f"{folder.name}: {shard.file}: {error.strerror or error}") from error
    return Checkpoint(folder, manifest)
