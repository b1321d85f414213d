"""The empty model: every module in its place, parameters and buffers on the meta device."""

import json
import threading
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from coterie.errors import UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.models.source import SUPPORTED

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_CAUSAL_LM = "AutoModelForCausalLM"

_CAUSAL_ANYWAY = frozenset({"gpt_neox", "gpt_neox_japanese"})
"""Decoders whose config has `is_decoder` all the same, for nothing."""

BUILDING = threading.RLock()
"""Held wherever modules are made or parameters put into them, since both libraries change the process meanwhile.

`torch.device(...)` as a context sets a global: two threads in it at once would leave it at `meta`. PEFT replaces
`Module.register_parameter` by one that moves whatever is registered, by any thread, to `meta`. Alone in its process a
stage never waits for it; it counts where several share one (tests, notebooks).
"""


def config_of(spec: ModelSpec) -> "PretrainedConfig":
    """The spec's Hugging Face config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - heavy

    values = json.loads(spec.config_json)
    return CONFIG_MAPPING[values["model_type"]].from_dict(values)


def model_class(spec_class: str, config: "PretrainedConfig") -> type["PreTrainedModel"]:
    """The transformers class that `auto_class` chooses for a config.

    Raises:
        UnsupportedModelError: transformers has no such class, or none for this model type; or it would be asked for
            the next token and reads it already.
    """
    import transformers  # noqa: PLC0415 - heavy

    auto = getattr(transformers, spec_class, None)
    mapping = getattr(auto, "_model_mapping", None)
    if mapping is None:
        raise UnsupportedModelError(
            f"transformers has no class {spec_class}", hint="for example AutoModelForTokenClassification"
        )
    try:
        found = mapping[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"{config.model_type} models have no {spec_class} in transformers", hint=f"supported are {SUPPORTED}"
        ) from None
    if spec_class == _CAUSAL_LM:
        _check_causal(config)
    return cast("type[PreTrainedModel]", found[0] if isinstance(found, tuple) else found)


def _check_causal(config: "PretrainedConfig") -> None:
    """Refuses halves of encoder-decoder models, and encoders, which transformers would build all the same."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder model, which cannot be cut yet", hint=f"supported are {SUPPORTED}"
        )
    if getattr(config, "is_decoder", True) is False and kind not in _CAUSAL_ANYWAY:
        raise UnsupportedModelError(
            f"{kind} models read text in both directions, so that they would see the word that they are to write",
            hint="use a causal model such as Llama, Qwen or GPT-2 for causal-lm and summarization",
        )


def empty_model(spec: ModelSpec) -> "PreTrainedModel":
    """The spec's whole model on the meta device: no memory for weights, no initialisation, no key-value cache."""
    config = config_of(spec)
    config.use_cache = False
    found = model_class(spec.auto_class, config)
    with BUILDING, torch.device("meta"):
        return found._from_config(config, dtype=torch.float32)  # noqa: SLF001 - what the auto class calls


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the transformer blocks: the module list that holds the most parameters.

    Raises:
        UnsupportedModelError: The model has no list of blocks.
    """
    best: tuple[str, nn.ModuleList] | None = None
    most = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            count = sum(parameter.numel() for parameter in module.parameters())
            if count > most:
                best, most = (name, module), count
    if best is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of blocks to cut between", hint=f"supported are {SUPPORTED}"
        )
    return best


def materialise_buffers(model: "PreTrainedModel", device: torch.device) -> None:
    """Gives buffers that are not in checkpoints (positions, rotary frequencies) their values, by the model's own code.

    This is what `from_pretrained` does; parameters are left alone.
    """
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            set_buffer(model, name, torch.empty_like(buffer, device="cpu"))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # noqa: SLF001 - transformers' own mark
    for module in model.modules():
        module._is_hf_initialized = False  # noqa: SLF001 - transformers' own mark
    model.initialize_weights()
    if device.type != "cpu":
        for name, buffer in list(model.named_buffers()):
            set_buffer(model, name, buffer.to(device))


def set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replaces one buffer."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._buffers[leaf] = value  # noqa: SLF001 - keeps whether the buffer is persistent
