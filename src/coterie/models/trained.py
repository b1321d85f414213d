"""A folder that holds a trained model: a plain Hugging Face one, or an adapter or side network beside its base."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coterie.errors import ModelError, UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_folder import SIDE_CONFIG, TASK_LAYERS, SideConfig, read_side_config
from coterie.models.adapters import is_transposed, module_of_magnitude
from coterie.models.anatomy import describe
from coterie.models.digest import weights_digest
from coterie.models.skeleton import empty_model
from coterie.models.source import ModelSource, open_model, read_config
from coterie.models.weights import FolderWeights, WeightStore

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_UNMERGED = ("alpha_pattern", "trainable_token_indices", "layer_replication")
"""Settings of PEFT that change the merge's arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A trained model's folder, opened; its weights are not read yet.

    Attributes:
        source: The model: the folder itself, or an adapter's base with the adapter's config (labels).
        adapter: The adapter's folder, if it is one.
        side: The folder, if it holds a side network and layers trained beside it, and a reference to its backbone.
        tokenizer_folder: Where the tokenizer is: a folder or a GGUF file.
    """

    source: ModelSource
    adapter: Path | None
    tokenizer_folder: Path
    side: Path | None = None

    def weights(self, spec: ModelSpec) -> WeightStore:
        """All weights, adapters merged in; a side network is none of them (see `coterie.sidetuning.inference`).

        Raises:
            ModelError: A layer was never trained and is in no file, or a file is damaged.
            UnsupportedModelError: The adapter is of a kind that is not merged here.
        """
        base = FolderWeights(self.source, spec)
        if self.adapter is not None:
            saved = read_tensors(self.adapter / ADAPTER_FILE)
        else:
            saved = {} if self.side is None else _read_task_layers(self.side)
        prefix = "" if self.adapter is None else _PREFIX
        lacking = [name for name in base.new_layers if prefix + name not in saved]
        if lacking:
            raise ModelError(
                f"{self.source.name} holds no {lacking[0]}: it was not trained for this task",
                hint="give the folder that a run exported (its `model` folder)",
            )
        if self.adapter is not None:
            return AdapterWeights(base, spec, self.adapter, saved)
        return base if self.side is None else _replaced(base, spec, self.side, saved)


def open_trained(name_or_folder: str | Path) -> TrainedModel:
    """Opens a trained model by folder, or by hub name (a plain model only).

    Raises:
        ModelError: The folder, or the base model of an adapter or a side network, is absent or incomplete.
        UnsupportedModelError: The model cannot be run here.
    """
    folder = Path(name_or_folder).expanduser()
    side = read_side_config(folder)
    if side is not None:
        return _open_side(name_or_folder, folder, side)
    if not (folder / ADAPTER_CONFIG).is_file():
        source = open_model(name_or_folder)
        return TrainedModel(source=source, adapter=None, tokenizer_folder=source.path)
    base_name = _adapter_settings(folder).get("base_model_name_or_path")
    if not base_name:
        raise ModelError(f"{folder / ADAPTER_CONFIG} names no base model", hint="export the adapter again, or merged")
    try:
        base = open_model(str(base_name))
    except ModelError as error:
        raise ModelError(
            f"the base model of the adapter {folder} is not there: {error.message}",
            hint="put it back where it was, or export the adapter merged (`coterie export --merge`)",
        ) from error
    own_config = (folder / "config.json").is_file()
    config = read_config(folder, str(folder)) if own_config else base.config
    own_tokenizer = (folder / "tokenizer_config.json").is_file()
    return TrainedModel(
        source=ModelSource(name=str(name_or_folder), folder=base.folder, config=config, gguf_file=base.gguf_file),
        adapter=folder,
        tokenizer_folder=folder if own_tokenizer else base.path,
    )


def _open_side(name: str | Path, folder: Path, side: SideConfig) -> TrainedModel:
    """A folder with a side network; what it was trained beside must be the same weights still."""
    path = side.backbone_path(folder)
    try:
        base = open_model(path)
    except ModelError as error:
        raise ModelError(
            f"the backbone of the side network {folder} is not there: {error.message}",
            hint=f"put it back where it was, or name its place in {folder / SIDE_CONFIG}",
        ) from error
    if side.backbone_digest and weights_digest(base) != side.backbone_digest:
        raise ModelError(
            f"{path} holds other weights than those that the side network {folder} was trained beside",
            hint="put the same weights back, or train again",
        )
    return TrainedModel(
        source=ModelSource(
            name=str(name), folder=base.folder, config=read_config(folder, str(folder)), gguf_file=base.gguf_file
        ),
        adapter=None,
        tokenizer_folder=folder if (folder / "tokenizer_config.json").is_file() else base.path,
        side=folder,
    )


def _replaced(base: WeightStore, spec: ModelSpec, folder: Path, tensors: Mapping[str, torch.Tensor]) -> WeightStore:
    """A backbone's weights with the layers in their places that were trained beside it."""
    strange = sorted(tensors.keys() - describe(spec).unit_of.keys())
    if strange:
        raise ModelError(
            f"{folder / TASK_LAYERS} holds {strange[0]}, which the backbone does not have",
            hint="side network and backbone do not belong together",
        )
    return ReplacedWeights(base, tensors)


class ReplacedWeights:
    """Weights of which some are replaced by others."""

    def __init__(self, base: WeightStore, tensors: Mapping[str, torch.Tensor]) -> None:
        self._base = base
        self._tensors = tensors

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightStore.get`."""
        wanted = list(names)
        found = self._base.get([name for name in wanted if name not in self._tensors])
        return found | {name: self._tensors[name].float() for name in wanted if name in self._tensors}


class AdapterWeights:
    """A base model's weights with low-rank adapters merged in as they are read; layers trained whole replace others."""

    def __init__(self, base: WeightStore, spec: ModelSpec, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks that every tensor of the adapter has its place.

        Raises:
            UnsupportedModelError: The adapter is of a kind that is not merged here.
            ModelError: It belongs to another model.
        """
        settings = _adapter_settings(folder)
        _refuse_unusual(settings, folder)
        self._base = base
        self._whole: dict[str, torch.Tensor] = {}
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._magnitudes: dict[str, torch.Tensor] = {}
        self._alpha = float(settings.get("lora_alpha", 1))
        self._root_scaled = bool(settings.get("use_rslora", False))
        anatomy, model = describe(spec), empty_model(spec)
        self._transposed = {f"{name}.weight" for name, module in model.named_modules() if is_transposed(module)}
        for key, tensor in tensors.items():
            name = key.removeprefix(_PREFIX)
            if (adapted := module_of_magnitude(name)) is not None:
                self._magnitudes[anatomy.slots.get(f"{adapted}.weight", f"{adapted}.weight")] = tensor
            elif name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                name = f"{module}.weight"
                self._pairs[anatomy.slots.get(name, name)] = tensor, tensors[f"{_PREFIX}{module}.lora_B.weight"]
            elif not name.endswith(".lora_B.weight"):
                self._whole[anatomy.slots.get(name, name)] = tensor
        tied = sorted(name for name in self._pairs if anatomy.tied is not None and name == anatomy.tied.name)
        if tied:
            raise UnsupportedModelError(
                f"the adapter {folder} adapts {tied[0]}, which both ends of the model use, at one end only",
                hint="no merged weight can do that; use it with PEFT itself",
            )
        strange = sorted((self._pairs.keys() | self._whole.keys()) - anatomy.unit_of.keys())
        if strange:
            raise ModelError(
                f"the adapter {folder} holds {strange[0]}, which its model does not have",
                hint="adapter and base model do not belong together",
            )
        if self._magnitudes.keys() != (self._pairs.keys() if settings.get("use_dora") else set()):
            raise ModelError(
                f"the adapter {folder} is DoRA's by its config or by its weights, and not by both",
                hint="export the adapter again",
            )

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightStore.get`."""
        wanted = list(names)
        result = self._base.get([name for name in wanted if name not in self._whole])
        result |= {name: self._whole[name].float() for name in wanted if name in self._whole}
        for name in wanted:
            if name in self._pairs:
                result[name] = self._merged(name, result[name])
        return result

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight with its adapter in it: [out, in], or [in, out] where the model holds it so."""
        merged = weight + self._delta(name)
        magnitude = self._magnitudes.get(name)
        if magnitude is None:
            return merged
        inputs = 0 if name in self._transposed else 1
        lengths: torch.Tensor = torch.linalg.norm(merged, dim=inputs)
        return (magnitude.float() / lengths).unsqueeze(inputs) * merged

    def _delta(self, name: str) -> torch.Tensor:
        """What an adapter adds to its weight: [out, in], or [in, out] where the model holds it so."""
        down, up = self._pairs[name]
        rank = down.shape[0]
        scale = self._alpha / (math.sqrt(rank) if self._root_scaled else rank)
        delta = (up.float() @ down.float()) * scale
        return delta.T if name in self._transposed else delta


def _adapter_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG} cannot be read: {error}", hint="export it again") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{folder / ADAPTER_CONFIG} is not a JSON object", hint="export it again")
    return settings


def _refuse_unusual(settings: Mapping[str, Any], folder: Path) -> None:
    unusual = [key for key in _UNMERGED if settings.get(key)]
    if settings.get("peft_type") != "LORA":
        unusual.append(f"peft_type = {settings.get('peft_type')}")
    if settings.get("bias", "none") != "none":
        unusual.append(f"bias = {settings['bias']}")
    if unusual:
        raise UnsupportedModelError(
            f"the adapter {folder} uses {', '.join(unusual)}, which is not merged here",
            hint="merge it with PEFT (`merge_and_unload`) and give the merged folder",
        )


def _read_task_layers(folder: Path) -> dict[str, torch.Tensor]:
    """Layers trained beside a side network; none where a causal model's own output layer serves."""
    path = folder / TASK_LAYERS
    return read_tensors(path) if path.is_file() else {}


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file.

    Raises:
        ModelError: It is not there, or damaged.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - loads with the first read
    from safetensors.torch import load_file  # noqa: PLC0415 - as above

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="export it again") from error
