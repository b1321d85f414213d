"""Low-rank adapters: which modules get them (resolved once on the whole model), and PEFT's injection on a stage."""

import math
import warnings
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from coterie.errors import RecipeError
from coterie.jobs.model_spec import LoraSpec
from coterie.models.block_quantizer import load_before_peft
from coterie.models.keys import seed_for_name
from coterie.models.skeleton import BUILDING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""PEFT's name for the one adapter; it is not part of parameter names here, nor in PEFT's files."""


_MAGNITUDE = ".lora_magnitude_vector"
"""What DoRA adds to a module's name: the length of each output's weights. In PEFT's files nothing follows it."""


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return ".lora_A." in name or ".lora_B." in name or _MAGNITUDE in name


def module_of_magnitude(name: str) -> str | None:
    """The adapted module if `name` is DoRA's vector of lengths, as PEFT's files name it; else None."""
    return name.removesuffix(_MAGNITUDE) if name.endswith(_MAGNITUDE) else None


def clean_name(name: str) -> str:
    """A parameter's name without PEFT's wrapping: base weights keep their own, adapters have that of PEFT's files."""
    if _MAGNITUDE in name:
        return name.partition(_MAGNITUDE)[0] + _MAGNITUDE
    if is_adapter(name):
        return name.replace(f".{ADAPTER}.", ".")
    return name.replace(".base_layer.", ".")


def resolve_lora(
    model: "PreTrainedModel", lora: LoraSpec, blocks_name: str, output_modules: tuple[str, ...]
) -> LoraSpec:
    """Turns target words into full module names.

    Args:
        model: The whole empty model.
        lora: `target_modules` may be empty or `("auto",)` (PEFT's choice for the family, else every linear layer of the
            blocks), `("all-linear",)`, or names: full ones or their last part. `modules_to_save` likewise; empty means
            `output_modules`.
        blocks_name: Module name of the list of blocks.
        output_modules: New layers of the output unit, which are trained whole beside the adapters.

    Raises:
        RecipeError: A name matches no module that can have an adapter; the message lists those that can.
    """
    adaptable = {name: module for name, module in model.named_modules() if _adapter_shape(module) is not None}
    in_blocks = [name for name in adaptable if name.startswith(f"{blocks_name}.")]
    words = lora.target_modules or ("auto",)
    if words == ("auto",):
        words = _family_targets(model.config.model_type) or ("all-linear",)
        targets = [name for name in in_blocks if _matches(name, words)] if words != ("all-linear",) else []
        targets = targets or in_blocks
    elif words == ("all-linear",):
        targets = in_blocks
    else:
        targets = [name for name in adaptable if _matches(name, words)]
        _check_all_match(words, targets, sorted({name.rpartition(".")[2] for name in adaptable}))
    saved = output_modules
    if lora.modules_to_save:
        modules = [name for name, _ in model.named_modules() if name]
        saved = tuple(name for name in modules if _matches(name, lora.modules_to_save))
        _check_all_match(lora.modules_to_save, list(saved), sorted({name.rpartition(".")[2] for name in modules}))
    return msgspec.structs.replace(lora, target_modules=tuple(targets), modules_to_save=saved)


def adapter_shapes(model: nn.Module, lora: LoraSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """`{adapter parameter: (module, shape)}` on the whole model, without building them."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in lora.target_modules:
        sizes = _adapter_shape(model.get_submodule(name))
        assert sizes is not None, f"{name} cannot have an adapter"
        inputs, outputs = sizes
        shapes[f"{name}.lora_A.weight"] = (name, (lora.rank, inputs))
        shapes[f"{name}.lora_B.weight"] = (name, (outputs, lora.rank))
        if lora.variant == "dora":
            shapes[name + _MAGNITUDE] = (name, (outputs,))
    return shapes


def new_adapter(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A low-rank matrix as PEFT starts it (A Kaiming-uniform, B zero), the same whichever stage holds it."""
    tensor = torch.zeros(shape)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(seed_for_name(seed, name))
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    return tensor


def new_magnitude(weight: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """DoRA's vector as PEFT starts it: the length of each output's row in the frozen weight [out, in].

    Args:
        weight: The module's own weight; [in, out] if `transposed`.
        transposed: See `is_transposed`.
    """
    lengths: torch.Tensor = torch.linalg.norm(weight.T if transposed else weight, dim=1)
    return lengths


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer holds its weight as [in, out], as GPT-2's do."""
    return type(module).__name__ == "Conv1D"


def inject(model: nn.Module, lora: LoraSpec, targets: list[str]) -> None:
    """Wraps `targets` (full names in `model`) by PEFT's own layers; their adapter weights stay on the meta device."""
    if not targets:
        return
    load_before_peft()
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415 - heavy, and only for LoRA

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.variant == "rslora",
        use_dora=lora.variant == "dora",
        target_modules=targets,
    )
    with BUILDING, warnings.catch_warnings():
        # PEFT says that it noticed GPT-2's transposed layers; the exported adapter config says so too.
        warnings.filterwarnings("ignore", message="fan_in_fan_out", category=UserWarning)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)


def refusal(model: nn.Module, lora: LoraSpec) -> str | None:
    """PEFT's reason not to adapt these targets of the whole empty model, which is spent by this."""
    try:
        inject(model, lora, list(lora.target_modules))
    except ValueError as error:
        return str(error)
    return None


def _family_targets(model_type: str) -> tuple[str, ...]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # noqa: PLC0415 - heavy

    return tuple(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type, ()))


def _matches(name: str, words: tuple[str, ...]) -> bool:
    return any(name == word or name.endswith(f".{word}") for word in words)


def _check_all_match(words: tuple[str, ...], found: list[str], known: list[str]) -> None:
    lost = [word for word in words if not any(_matches(name, (word,)) for name in found)]
    if lost:
        raise RecipeError(
            f"no layer of the model is named {', '.join(lost)}", hint=f"its layers are named {', '.join(known)}"
        )


def _adapter_shape(module: nn.Module) -> tuple[int, int] | None:
    """Input and output width of a module that can have an adapter: a linear layer, or GPT-2's transposed one."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if is_transposed(module) and isinstance(weight := getattr(module, "weight", None), torch.Tensor):
        return weight.shape[0], weight.shape[1]
    return None
