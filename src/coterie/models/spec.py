"""From a model and the user's wishes to the spec that every worker gets."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from coterie.errors import RecipeError
from coterie.jobs.model_spec import FrozenDtype, LoraSpec, ModelSpec, TrainableMethod
from coterie.models.adapters import refusal, resolve_lora
from coterie.models.anatomy import Anatomy, describe
from coterie.models.frozen_weights import frozen_matrices
from coterie.models.skeleton import empty_model
from coterie.models.source import ModelSource, last_line
from coterie.models.trainable import Choice, adapted_in, frozen_under_bitfit, frozen_under_head, frozen_when_chosen
from coterie.models.weights import TASK_LAYERS, FolderWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_model_spec(  # noqa: PLR0913 - one argument per wish, all by keyword
    source: ModelSource,
    *,
    auto_class: str,
    config_overrides: Mapping[str, Any],
    seed: int,
    method: TrainableMethod = "full",
    lora: LoraSpec | None = None,
    frozen_patterns: Sequence[str] = (),
    trainable_patterns: Sequence[str] = (),
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
    frozen_dtype: FrozenDtype = "float32",
) -> ModelSpec:
    """Resolves adapters and frozen parameters on the whole model, and refuses what cannot be cut.

    Args:
        source: The opened model.
        auto_class: Such as `AutoModelForTokenClassification`.
        config_overrides: Config values that the task or the user sets (labels, dropout).
        seed: Base of all randomness.
        method: What is trained: all, adapters, biases and task layers, or task layers.
        lora: Adapter settings with target words (see `resolve_lora`); the default ones if `method` is `lora`.
        frozen_patterns: What `full` and `bitfit` leave as it is; see `coterie.models.trainable.matching`.
        trainable_patterns: The complement: all that `full` trains, where `bitfit` trains biases and `lora` adapters.
        compute_dtype: `bfloat16` runs the forward under autocast; weights stay float32.
        frozen_dtype: How weights of linear layers that are not trained are held; see `coterie.models.frozen_weights`.

    Raises:
        UnsupportedModelError: The model cannot be cut; the message says why.
        RecipeError: A setting, target or pattern matches nothing, PEFT refuses, nothing is left to train, or there is
            nothing that `frozen_dtype` would concern.
    """
    config = _config(source, config_overrides)
    plain = ModelSpec(
        config_json=config.to_json_string(),
        auto_class=auto_class,
        seed=seed,
        compute_dtype=compute_dtype,
        frozen_dtype=frozen_dtype,
    )
    anatomy = describe(plain)
    choice = Choice(frozen_patterns, trainable_patterns)
    if method == "lora":
        resolved = _adapters(source, plain, anatomy, lora or LoraSpec(), choice)
        return _with_frozen_matrices(msgspec.structs.replace(plain, method="lora", lora=resolved))
    if lora is not None:
        raise RecipeError(
            f"adapter settings are given, but the method is {'full fine-tuning' if method == 'full' else method}",
            hint="use the method `lora`",
        )
    frozen = _frozen(source, plain, anatomy, method, choice)
    return _with_frozen_matrices(msgspec.structs.replace(plain, method=method, frozen=frozen))


def make_forward_spec(
    source: ModelSource,
    *,
    auto_class: str,
    config_overrides: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
    frozen_dtype: FrozenDtype = "float32",
) -> ModelSpec:
    """The spec of a model that only predicts: as its folder says, but for `config_overrides`, nothing of it trained.

    Raises:
        UnsupportedModelError: The model cannot be cut; the message says why.
        RecipeError: It has no layer that `frozen_dtype` would concern.
    """
    spec = ModelSpec(
        config_json=_config(source, config_overrides).to_json_string(),
        auto_class=auto_class,
        seed=seed,
        method="none",
        compute_dtype=compute_dtype,
        frozen_dtype=frozen_dtype,
    )
    describe(spec)
    return _with_frozen_matrices(spec)


def _with_frozen_matrices(spec: ModelSpec) -> ModelSpec:
    """The spec, unless its `frozen_dtype` would have no effect."""
    if spec.frozen_dtype == "float32" or frozen_matrices(spec):
        return spec
    if spec.method == "full" and not spec.frozen:
        raise RecipeError(
            f"frozen_dtype = {spec.frozen_dtype} is for weights that are not trained, and full fine-tuning trains all",
            hint="use the method `lora`, or leave frozen_dtype out",
        )
    raise RecipeError(
        f"frozen_dtype = {spec.frozen_dtype}, but no linear layer inside the model's blocks has a frozen weight",
        hint="leave frozen_dtype out, or train less",
    )


def _config(source: ModelSource, overrides: Mapping[str, Any]) -> "PretrainedConfig":
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415 - heavy

    unknown = [key for key in overrides if not hasattr(source.config, key)]
    if unknown:
        raise RecipeError(
            f"the config of {source.name} has no setting {', '.join(unknown)}",
            hint=f"its settings are {', '.join(sorted(source.config.to_dict()))}",
        )
    try:
        return source.config.__class__.from_dict(source.config.to_dict(), **overrides)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise RecipeError(
            f"the config of {source.name} cannot have these settings: {last_line(error)}",
            hint="correct the model's settings",
        ) from error


def _task_layers(anatomy: Anatomy, source: ModelSource, spec: ModelSpec) -> tuple[str, ...]:
    """Layers that a task adds on top of a pretrained model: those with the usual names, and those the folder lacks."""
    last = anatomy.unit_count - 1
    modules = {name.rpartition(".")[0] for name, unit in anatomy.unit_of.items() if unit == last}
    usual = {module for module in modules if module.split(".", 1)[0] in TASK_LAYERS}
    new = {name.rpartition(".")[0] for name in FolderWeights(source, spec).new_layers}
    return tuple(sorted(usual | new))


def _accepted_by_peft(spec: ModelSpec, lora: LoraSpec, *, named: bool) -> LoraSpec:
    """Leaves out the kinds of layers that PEFT refuses (some of Mamba's), unless the user named them."""
    reason = refusal(empty_model(spec), lora)
    if reason is None:
        return lora
    if named:
        raise RecipeError(f"PEFT refuses these targets: {reason}", hint="use the target `auto` or other layers")
    kept: list[str] = []
    for kind in sorted({name.rpartition(".")[2] for name in lora.target_modules}):
        of_kind = tuple(name for name in lora.target_modules if name.rpartition(".")[2] == kind)
        if refusal(empty_model(spec), msgspec.structs.replace(lora, target_modules=of_kind)) is None:
            kept += of_kind
    return msgspec.structs.replace(lora, target_modules=tuple(n for n in lora.target_modules if n in set(kept)))


def _frozen(
    source: ModelSource, plain: ModelSpec, anatomy: Anatomy, method: TrainableMethod, choice: Choice
) -> tuple[str, ...]:
    """Names of the parameters that are not trained under a method that trains the model's own."""
    if method == "bitfit":
        return frozen_under_bitfit(anatomy, choice, _task_layers(anatomy, source, plain))
    if method == "head":
        if any(choice):
            raise RecipeError(
                "the method `head` trains the task layers and nothing else",
                hint="leave `freeze` and `trainable` out, or choose layers with the method `full`",
            )
        return frozen_under_head(anatomy, _task_layers(anatomy, source, plain))
    if not any(choice):
        return ()
    return frozen_when_chosen(anatomy, choice, FolderWeights(source, plain).new_layers)


def _adapters(source: ModelSource, plain: ModelSpec, anatomy: Anatomy, wished: LoraSpec, choice: Choice) -> LoraSpec:
    """The adapters with the full names of the modules that get them."""
    if choice.frozen:
        raise RecipeError(
            "LoRA freezes every weight of the model by itself",
            hint="leave `freeze` out with LoRA; `trainable` chooses where adapters go",
        )
    resolved = resolve_lora(empty_model(plain), wished, anatomy.blocks_name, _task_layers(anatomy, source, plain))
    shared = [name for name in resolved.target_modules if f"{name}.weight" in anatomy.slots]
    if shared:
        raise RecipeError(
            f"{shared[0]} uses the embedding's matrix (tied), and an adapter there could not be merged into either end",
            hint=f"leave {shared[0]} out of lora_targets",
        )
    if choice.trainable:
        resolved = msgspec.structs.replace(resolved, target_modules=adapted_in(anatomy, resolved, choice.trainable))
    return _accepted_by_peft(plain, resolved, named=wished.target_modules not in {(), ("auto",), ("all-linear",)})
