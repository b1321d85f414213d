"""The whole trained model in memory, in transformers' or PEFT's own classes, so that they save it in their own way."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.weights import CheckpointWeights
from coterie.errors import UsageError
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.models.adapters import ADAPTER, clean_name, is_adapter, is_transposed
from coterie.models.anatomy import Anatomy, describe
from coterie.models.skeleton import BUILDING, empty_model
from coterie.models.source import ModelSource
from coterie.models.weights import FolderWeights, WeightStore
from coterie.models.whole import load_whole_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ExportDtype = Literal["float32", "bfloat16", "float16"]

_PEFT_PREFIX = "base_model.model."

_PEFT_TASKS = {
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForCausalLM": "CAUSAL_LM",
}
_PEFT_CLASSIFIERS = ("classifier", "score")
"""PEFT trains and saves modules of these names by itself under TOKEN_CLS and SEQ_CLS."""


def assemble_full(checkpoint: Checkpoint, source: ModelSource, dtype: ExportDtype) -> "PreTrainedModel":
    """The model with its trained weights, on the CPU, as `from_pretrained` would build it.

    Under LoRA: with the adapters merged into the weights, in float32 before the conversion to `dtype`.
    """
    spec = checkpoint.manifest.terms.model
    weights = CheckpointWeights(checkpoint, FolderWeights(source, spec))
    plain = msgspec.structs.replace(spec, method="full", lora=None)
    if spec.lora is None:
        return load_whole_model(plain, _Cast(weights, dtype), use_cache=True)
    model = load_whole_model(plain, weights, use_cache=True)
    anatomy = describe(spec)
    wrapped = _with_adapters(model, spec, anatomy, weights.get(_adapter_names(spec, anatomy)), source.name)
    merged = wrapped.merge_and_unload()
    for name, tensor in [*merged.named_parameters(), *merged.named_buffers()]:
        tensor.data = cast_tensor(name, tensor.data, dtype)
    result: PreTrainedModel = merged
    return result


def assemble_adapter(checkpoint: Checkpoint, source: ModelSource, base_name: str, dtype: ExportDtype) -> "PeftModel":
    """A PEFT model that holds what was trained; the frozen weights stay on the meta device and take no memory."""
    spec = checkpoint.manifest.terms.model
    anatomy = describe(spec)
    names = _adapter_names(spec, anatomy)
    weights = CheckpointWeights(checkpoint, FolderWeights(source, spec))
    state = {name: cast_tensor(name, tensor, dtype) for name, tensor in weights.get(names).items()}
    return _with_adapters(empty_model(spec), spec, anatomy, state, base_name)


def peft_saved_modules(anatomy: Anatomy, lora: LoraSpec) -> tuple[str, ...]:
    """`modules_to_save` as PEFT wants it: a module whose parts are all trained whole is named instead of its parts."""
    trained = {name for unit in anatomy.trainable for name in unit if not is_adapter(name)}
    others = set(anatomy.unit_of) - trained
    tops: set[str] = set()
    for module in lora.modules_to_save:
        top = module
        while "." in top and not any(name.startswith(top.rpartition(".")[0] + ".") for name in others):
            top = top.rpartition(".")[0]
        tops.add(top)
    return tuple(sorted(tops))


class _Cast:
    """Another store's tensors in another type."""

    def __init__(self, weights: WeightStore, dtype: ExportDtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightStore.get`."""
        return {name: cast_tensor(name, tensor, self._dtype) for name, tensor in self._weights.get(names).items()}


def _adapter_names(spec: ModelSpec, anatomy: Anatomy) -> list[str]:
    assert spec.lora is not None
    saved = tuple(f"{module}." for module in peft_saved_modules(anatomy, spec.lora))
    return [name for name in anatomy.unit_of if is_adapter(name) or name.startswith(saved)]


def _with_adapters(
    model: "PreTrainedModel", spec: ModelSpec, anatomy: Anatomy, state: dict[str, torch.Tensor], base_name: str
) -> "PeftModel":
    """Wrap `model` by PEFT and put the trained tensors into their places."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - heavy, only for LoRA

    lora = spec.lora
    assert lora is not None
    saved = peft_saved_modules(anatomy, lora)
    model.name_or_path = base_name  # where PEFT takes `base_model_name_or_path` from
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.variant == "rslora",
        use_dora=lora.variant == "dora",
        target_modules=list(lora.target_modules),
        modules_to_save=list(saved) or None,
        fan_in_fan_out=_transposed(model, lora),
        task_type=_peft_task(model, spec.auto_class, saved),
    )
    with BUILDING, warnings.catch_warnings():
        # PEFT asks transformers for an attribute by its old name; nothing that a user could act on.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        wrapped = get_peft_model(model, config, low_cpu_mem_usage=True)
    # Not by PEFT's own loading, which would move the adapters to where the frozen weights are: to nowhere.
    places = {place: _name_in_files(place) for place, _ in wrapped.named_parameters()}
    wrapped.load_state_dict(
        {place: state[name] for place, name in places.items() if name in state}, strict=False, assign=True
    )
    lost = state.keys() - places.values()
    assert not lost, f"PEFT has no place for {sorted(lost)[:3]}"
    wrapped.eval()
    return wrapped


def _name_in_files(place: str) -> str:
    """The name that PEFT's files, and the anatomy, have for a parameter of a PEFT model; empty for frozen copies."""
    if ".original_module." in place:
        return ""
    name = place.removeprefix(_PEFT_PREFIX).replace(f".modules_to_save.{ADAPTER}.", ".")
    return clean_name(name)


def _transposed(model: "PreTrainedModel", lora: LoraSpec) -> bool:
    """Whether the adapted layers hold their weights as [in, out], as GPT-2's do: PEFT wants to be told."""
    return any(is_transposed(model.get_submodule(name)) for name in lora.target_modules)


def _peft_task(model: "PreTrainedModel", auto_class: str, saved: tuple[str, ...]) -> str | None:
    """PEFT's task type, unless PEFT would then save a classifier that was not trained."""
    task = _PEFT_TASKS.get(auto_class)
    if task in {"TOKEN_CLS", "SEQ_CLS"}:
        heads = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in _PEFT_CLASSIFIERS}
        return task if heads <= set(saved) else None
    return task


def cast_tensor(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The tensor in another type; whole numbers stay as they are.

    Raises:
        UsageError: Values do not fit the type.
    """
    if not tensor.is_floating_point():
        return tensor
    result = tensor.to(getattr(torch, dtype))
    if dtype == "float16" and not result.isfinite().all() and tensor.isfinite().all():
        raise UsageError(
            f"{name} holds {tensor.abs().max().item():.3g}, and float16 reaches only to 65504",
            hint="export as bfloat16 or float32",
        )
    return result
