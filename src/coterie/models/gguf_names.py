"""Names in a GGUF file and names in memory, by transformers' own conversion (renaming, permuted heads, fused experts).

transformers has two: an old one for most families, by the name tables of `gguf` and a processor per family, and a new
one in its general language of weight conversions. This is the only module that touches either.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from coterie.errors import ModelError, UnsupportedModelError
from coterie.models.checkpoint_names import CheckpointNames, ReadTensor
from coterie.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NOT_WEIGHTS = ("rope_freqs.weight", ".attn_rot_embd.weight")
"""Tensors that hold what a config says: they may be left over."""

_OUTPUT_LAYER = "output.weight"
"""Left over when a model with another output layer is made of a causal one."""


class GgufNames:
    """Which of the file's tensors make up each of a model's tensors."""

    def __init__(self, model: "PreTrainedModel", file: GgufFile, name: str) -> None:
        """Works out the mapping.

        Args:
            model: The whole empty model.
            file: The GGUF file.
            name: What the user calls it.

        Raises:
            ModelError: The file holds tensors that transformers would drop.
        """
        from transformers.integrations.gguf import GGUF_ARCHS, get_gguf_conversion_mapping  # noqa: PLC0415 - heavy

        self._names: CheckpointNames | _OldNames
        if file.architecture in GGUF_ARCHS:
            transforms = get_gguf_conversion_mapping(file.architecture, model.config)
            self._names = CheckpointNames(model, file.tensors, transforms)
        else:
            self._names = _OldNames(model, file)
        self._file = file
        lost = [
            tensor
            for tensor in file.tensors
            if tensor not in self._names.used and tensor != _OUTPUT_LAYER and not tensor.endswith(_NOT_WEIGHTS)
        ]
        if lost:
            raise ModelError(
                f"{name} holds {len(lost)} tensors that a {model.config.model_type} model has no place for, such as "
                f"{lost[0]}",
                hint="use the model's Hugging Face folder",
            )

    def __contains__(self, name: str) -> bool:
        """Whether the file holds the model's tensor `name`."""
        return name in self._names

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors `names` (each must be contained) as float32, reading only what makes them up."""
        return self._names.read(names, self._file.read)


class _OldNames:
    """The conversion of `transformers.modeling_gguf_pytorch_utils`, tensor by tensor instead of the whole file."""

    def __init__(self, model: "PreTrainedModel", file: GgufFile) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor  # noqa: PLC0415 - heavy

        self._processor: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(model.config.to_dict())
        self._mapping = model_names(model, file.architecture, self._processor)
        self._parts: dict[str, list[str]] = {}
        for tensor in file.tensors:
            # Experts are mapped without the ending.
            target = self._mapping.get(tensor) or self._mapping.get(tensor.removesuffix(".weight"))
            if target is not None:
                self._parts.setdefault(target, []).append(tensor)
        self.used = frozenset(tensor for parts in self._parts.values() for tensor in parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def read(self, names: Iterable[str], read: ReadTensor) -> dict[str, torch.Tensor]:
        """See `GgufNames.read`."""
        return {name: self._read(name, read) for name in names}

    def _read(self, name: str, read: ReadTensor) -> torch.Tensor:
        import numpy as np  # noqa: PLC0415 - beside its one use

        stored: dict[str, torch.Tensor] = {}
        for part in self._parts[name]:
            made = self._processor.process(
                weights=read(part).numpy(),
                name=part,
                tensor_key_mapping=self._mapping,
                parsed_parameters={"tensors": stored},
            )
            if made.name is not None:
                stored[name] = torch.from_numpy(np.ascontiguousarray(made.weights))
        return stored[name]


def model_names(model: "PreTrainedModel", architecture: str, processor: Any) -> dict[str, str]:
    """llama.cpp's names and the model's, as transformers' `get_gguf_hf_weights_map` pairs them.

    That builds the table of names anew for each of a model's hundreds of modules, which takes ten seconds.

    Raises:
        UnsupportedModelError: `gguf` does not know the architecture.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: PLC0415 - only for GGUF files

    known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise UnsupportedModelError(f"`gguf` does not know the family {architecture!r}", hint="update `gguf`")
    table = get_tensor_name_map(known[architecture], model.config.num_hidden_layers)
    names = list(model.state_dict())
    paired: dict[str, str] = {}
    for path, _ in model.named_modules():
        # A file may name a module's tensors as if it were the whole model: the outermost reading that fits counts.
        outer = f"{path}." if path else ""
        of_module: dict[str, str] = {}
        for name in (processor.preprocess_name(name[len(outer) :]) for name in names if name.startswith(outer)):
            stem, dot, leaf = name.rpartition(".")
            if leaf not in {"weight", "bias"}:
                stem, dot, leaf = name, "", ""
            stored = table.get_name(stem)
            if stored is None:
                processor.perform_fallback_tensor_mapping(of_module, dot + leaf, outer, name)
            else:
                of_module[f"{stored}{dot}{leaf}"] = outer + name
        paired = of_module | paired
    return paired
