"""Where a stage's weights come from: a model folder, or a mapping (received over a link, read from a checkpoint)."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from coterie.errors import ModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.logs import get_logger
from coterie.models.adapters import is_adapter, is_transposed, module_of_magnitude, new_adapter, new_magnitude
from coterie.models.anatomy import describe
from coterie.models.checkpoint_names import CheckpointNames
from coterie.models.gguf_file import read_gguf
from coterie.models.gguf_names import GgufNames
from coterie.models.new_layers import new_parameter
from coterie.models.skeleton import empty_model
from coterie.models.source import ModelSource, weight_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = get_logger(__name__)

TASK_LAYERS = frozenset({"classifier", "score", "qa_outputs"})
"""First part of the names that transformers gives to task layers; PEFT trains them whole as well."""


class WeightStore(Protocol):
    """Gives parameters (and the buffers that checkpoints hold) by name, as float32."""

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of `names`, as named in `Anatomy.unit_of`.

        Raises:
            ModelError: One of them is not there.
        """
        ...


class MappingWeights:
    """Tensors that are here already. They are handed over, not copied: the stage trains these very tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightStore.get`."""
        wanted = list(names)
        lost = [name for name in wanted if name not in self._tensors]
        if lost:
            raise ModelError(
                f"{len(lost)} of {len(wanted)} tensors are missing, among them {', '.join(lost[:3])}",
                hint="the weights belong to another model or another cut",
            )
        # A part of a frozen matrix (`x.weight/packed`) has the type that it has.
        return {name: self._tensors[name] if "/" in name else _as_float32(self._tensors[name]) for name in wanted}


class FolderWeights:
    """A model folder or GGUF file: only what is asked is read; new layers and adapters start from (seed, name).

    Attributes:
        folder: The folder; that of the file, if it is a GGUF file.
        is_gguf: It is a GGUF file.
    """

    def __init__(self, source: ModelSource, spec: ModelSpec) -> None:
        """Lists its tensors.

        Raises:
            ModelError: No weights, a shard that is absent, or a file that is damaged.
        """
        self.folder = source.folder
        self.is_gguf = source.gguf_file is not None
        self._name = source.name
        self._spec = spec
        self._anatomy = describe(spec)
        self._model = empty_model(spec)
        self._tensors: _Tensors
        if source.gguf_file is None:
            self._tensors = _FolderTensors(self._model, _list_tensors(weight_file(source.folder, source.name)))
        else:
            self._tensors = GgufNames(self._model, read_gguf(source.gguf_file), source.name)

    @property
    def new_layers(self) -> tuple[str, ...]:
        """Parameters that the folder does not hold and that start from (seed, name): a new classifier."""
        return tuple(n for n in self._anatomy.unit_of if not is_adapter(n) and self._held_as(n) is None)

    def check_classifier(self) -> None:
        """Refuse a folder whose classifier is for other labels, before workers are waited for.

        Raises:
            ModelError: A task layer in the folder has another shape than in the config.
        """
        last = self._anatomy.unit_count - 1
        outputs = [name for name, unit in self._anatomy.unit_of.items() if unit == last]
        self.get(n for n in outputs if n.split(".", 1)[0] in TASK_LAYERS and self._held_as(n) is not None)

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightStore.get`.

        Raises:
            ModelError: A parameter of the embedding or of a block is not in the folder, or has another shape.
        """
        held: dict[str, str] = {}
        result: dict[str, torch.Tensor] = {}
        for name in names:
            slot = None if is_adapter(name) else self._held_as(name)
            if slot is not None:
                held[slot] = name
            else:
                result[name] = self._new(name)
        for slot, tensor in self._tensors.read(held).items():
            name = held[slot]
            expected = self._anatomy.shapes.get(name, tuple(tensor.shape))
            if tuple(tensor.shape) != expected:
                hint = "its files do not belong together: download or save the model again"
                if name.split(".", 1)[0] in TASK_LAYERS:
                    hint = (
                        "the folder was trained for another number of labels: start from its pretrained model, or save "
                        "it without that layer (AutoModel.from_pretrained(folder).save_pretrained(new_folder))"
                    )
                raise ModelError(
                    f"{name} has shape {tuple(tensor.shape)} in {self._name}, and {expected} is wanted", hint=hint
                )
            result[name] = tensor
        return result

    def _held_as(self, name: str) -> str | None:
        """The name under which the folder holds a parameter; a tied one may be there under either of its names."""
        for slot in (name, *(slot for slot, first in self._anatomy.slots.items() if first == name)):
            if slot in self._tensors:
                return slot
        return None

    def _new(self, name: str) -> torch.Tensor:
        module = module_of_magnitude(name)
        if module is not None:
            weight = self._anatomy.slots.get(f"{module}.weight", f"{module}.weight")
            return new_magnitude(
                self.get([weight])[weight], transposed=is_transposed(self._model.get_submodule(module))
            )
        if is_adapter(name):
            return new_adapter(name, self._anatomy.shapes[name], self._spec.seed)
        if self._anatomy.unit_of.get(name) != self._anatomy.unit_count - 1:
            raise ModelError(
                f"{self._name} does not hold {name}",
                hint="the folder is incomplete or belongs to another kind of model",
            )
        _LOG.info("%s is new and starts from seed %d", name, self._spec.seed)
        return new_parameter(self._model, name, self._spec.seed)


class _Tensors(Protocol):
    """The tensors that a folder or file holds, by the model's names."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]: ...


class _FolderTensors:
    """Those of safetensors or torch files."""

    def __init__(self, model: "PreTrainedModel", files: Mapping[str, Path]) -> None:
        self._files = files
        self._names = CheckpointNames(model, files)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors `names` (each must be contained), each file opened at most once."""
        reader = _Reader(self._files)
        try:
            return self._names.read(names, reader.read)
        finally:
            reader.close()


class _Reader:
    """Reads single tensors, each file opened at most once."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, object] = {}

    def read(self, key: str) -> torch.Tensor:
        """One tensor as float32 in memory of its own."""
        from safetensors import SafetensorError  # noqa: PLC0415 - loads with the first read

        path = self._files[key]
        try:
            if path.suffix == ".safetensors":
                return _as_float32(self._safetensors(path).get_tensor(key))  # type: ignore[attr-defined]
            return _as_float32(self._bin(path)[key]).clone()
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise ModelError(f"{key} cannot be read from {path}: {error}", hint="download the model again") from error

    def close(self) -> None:
        """Lets go of all files."""
        self._open.clear()

    def _safetensors(self, path: Path) -> object:
        if path not in self._open:
            from safetensors import safe_open  # noqa: PLC0415 - loads with the first read

            # pread, since mapping a whole file counts against a memory limit even if little of it is read.
            self._open[path] = safe_open(path, framework="pt", device="cpu", backend="pread")
        return self._open[path]

    def _bin(self, path: Path) -> dict[str, torch.Tensor]:
        if path not in self._open:
            self._open[path] = _load_bin(path)
        opened = self._open[path]
        assert isinstance(opened, dict)
        return opened


def _list_tensors(path: Path) -> dict[str, Path]:
    """`{tensor name: file}` of a weight file or of a sharded one's index."""
    if path.suffix != ".json":
        return dict.fromkeys(_keys_of(path), path)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        files = {str(key): path.parent / str(file) for key, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is not an index of weight files", hint="download the model again") from error
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise ModelError(
            f"{path.parent} lacks {len(absent)} weight files, among them {absent[0]}", hint="download the model again"
        )
    return files


def _keys_of(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_load_bin(path))
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - loads with the first read

    try:
        with safe_open(path, framework="pt", device="cpu", backend="pread") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}", hint="download the model again") from error


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    """A torch file, read as data only (`weights_only`), mapped where its format allows it."""
    import zipfile  # noqa: PLC0415 - beside its one use
    from pickle import UnpicklingError  # noqa: PLC0415 - only to name the error; torch reads weights only

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        raise ModelError(f"{path} is damaged or holds more than weights: {error}", hint="download it again") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} does not hold named weights", hint="download the model again")
    return {str(key): value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
