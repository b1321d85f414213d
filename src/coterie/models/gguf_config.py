"""A Hugging Face config out of a GGUF file's metadata, by transformers' own tables, with what those leave out.

`AutoConfig.from_pretrained(gguf_file=...)` gives the same config but reads the vocabulary several times, which takes a
minute for a large one; so its tables are applied here, and it is asked itself only where it has rules beyond them.
"""

import math
from typing import TYPE_CHECKING, Any

from coterie.errors import ModelError, UnsupportedModelError
from coterie.models.gguf_file import GgufFile, MetadataValue

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MODEL_TYPES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "starcoder2": "starcoder2",
    "falcon": "falcon",
    "bloom": "bloom",
    "mamba": "mamba",
    "nemotron": "nemotron",
}
"""llama.cpp's families whose config is what the tables say, and transformers' names of them."""

_ALWAYS_TIED = ("falcon", "bloom")
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1, 3.2 and 3.3 has; only the factor differs."""


def config_from_gguf(file: GgufFile, name: str) -> "PretrainedConfig":
    """The config of the model that a GGUF file holds.

    Args:
        file: The file.
        name: What the user calls it, for messages.

    Raises:
        ModelError: Its metadata is incomplete or does not fit together.
        UnsupportedModelError: transformers cannot read such a model from GGUF, or would read it wrongly.
    """
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415 - heavy, as the next one
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    _refuse_what_would_be_lost(file, name)
    values = _values(file, name)
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except KeyError as error:
        raise _unknown(file, name) from error
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise ModelError(
            f"{name} holds settings that do not fit together: {reason}", hint="download the file again"
        ) from error


def _values(file: GgufFile, name: str) -> dict[str, Any]:
    from transformers import AutoConfig  # noqa: PLC0415 - heavy, as the next ones
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING  # noqa: PLC0415
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config  # noqa: PLC0415

    family = file.architecture
    facts = file.metadata
    if family in GGUF_CONFIG_ARCHS:
        try:
            return dict(get_gguf_config(facts, tuple(file.tensors)))
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ModelError(f"{name} lacks the setting {error}", hint="download the file again") from error
    model_type = _MODEL_TYPES.get(family)
    if model_type is None:
        try:
            own = AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name, local_files_only=True)
            return dict(own.to_dict())
        except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
            raise _unknown(file, name) from error
    table_name = model_type.removesuffix("_text")
    values: dict[str, Any] = {
        "model_type": model_type,
        "tie_word_embeddings": "output.weight" not in file.tensors or family in _ALWAYS_TIED,
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(table_name, {}),
    }
    for prefix, table in ((family, GGUF_CONFIG_MAPPING[table_name]), ("tokenizer", GGUF_CONFIG_MAPPING["tokenizer"])):
        for key, setting in table.items():
            if setting is not None and f"{prefix}.{key}" in facts:
                values[setting] = _single(facts[f"{prefix}.{key}"])
    values.setdefault("vocab_size", facts.get("tokenizer.ggml.tokens"))
    values |= _left_out(file, model_type)
    return {key: value for key, value in values.items() if value is not None}


def _left_out(file: GgufFile, model_type: str) -> dict[str, Any]:
    """Facts that the file states and transformers' tables do not take."""
    extra: dict[str, Any] = {}
    if model_type in {"qwen3", "qwen2_moe"} and f"{file.architecture}.attention.key_length" in file.metadata:
        extra["head_dim"] = file.metadata[f"{file.architecture}.attention.key_length"]
    if model_type in {"llama", "qwen3"}:
        extra["attention_bias"] = "blk.0.attn_q.bias" in file.tensors or None
        extra["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors or None
    if model_type == "gpt2":
        extra["n_positions"] = file.metadata.get("gpt2.context_length")
        extra["n_inner"] = file.metadata.get("gpt2.feed_forward_length")
    if model_type.endswith("_moe"):
        extra["moe_intermediate_size"] = file.metadata.get(f"{file.architecture}.expert_feed_forward_length")
    if _ROPE_FACTORS in file.tensors:
        theta = file.metadata.get(f"{file.architecture}.rope.freq_base", 10000.0)
        extra["rope_parameters"] = _llama3_rope(file, theta)
        extra["rope_theta"] = None
    return extra


def _llama3_rope(file: GgufFile, theta: MetadataValue) -> dict[str, Any]:
    """Llama 3.1's scaling of positions, of which the file holds only the result: one factor per rotary frequency.

    Raises:
        UnsupportedModelError: The factors are not what Llama 3.1's rule gives.
    """
    factors = file.read(_ROPE_FACTORS).double()
    assert isinstance(theta, float | int)
    parameters = {"rope_type": "llama3", "rope_theta": theta, "factor": factors.max().item(), **_LLAMA3_ROPE}
    if not _close(factors.tolist(), llama3_factors(parameters, 2 * len(factors))):
        raise UnsupportedModelError(
            f"{file.path} scales its positions in a way that is not Llama 3.1's",
            hint="use the model's Hugging Face folder",
        )
    return parameters


def llama3_factors(parameters: dict[str, Any], head_width: int) -> list[float]:
    """By how much Llama 3.1's rule divides each rotary frequency (the rule of transformers' `rope_type = "llama3"`)."""
    low = parameters["original_max_position_embeddings"] / parameters["low_freq_factor"]
    high = parameters["original_max_position_embeddings"] / parameters["high_freq_factor"]
    factors = []
    for index in range(0, head_width, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (index / head_width)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(float(parameters["factor"]))
        else:
            ratio = parameters["original_max_position_embeddings"] / wavelength - parameters["low_freq_factor"]
            smooth = ratio / (parameters["high_freq_factor"] - parameters["low_freq_factor"])
            factors.append(1.0 / ((1.0 - smooth) / parameters["factor"] + smooth))
    return factors


def _refuse_what_would_be_lost(file: GgufFile, name: str) -> None:
    """Refuse files that transformers reads as if a part of them were not there."""
    family = file.architecture
    experts = file.metadata.get(f"{family}.expert_count", 0)
    if family == "llama" and isinstance(experts, int) and experts > 0:
        raise UnsupportedModelError(
            f"{name} is a mixture of {experts} experts of the Llama family (Mixtral), which cannot be read from GGUF",
            hint="use the model's Hugging Face folder",
        )
    scaling = file.metadata.get(f"{family}.rope.scaling.type", "none")
    long_factors = [tensor for tensor in file.tensors if tensor.startswith("rope_factors_")]
    if (scaling != "none" and family not in {"gpt-oss", "gpt_oss"}) or long_factors:
        kind = scaling if scaling != "none" else "longrope"
        raise UnsupportedModelError(
            f"{name} scales its positions ({kind}), which transformers drops when it reads a GGUF file",
            hint="use the model's Hugging Face folder",
        )


def _unknown(file: GgufFile, name: str) -> UnsupportedModelError:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS  # noqa: PLC0415 - heavy, as the next one
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES  # noqa: PLC0415

    known = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer", "t5", "umt5"}
    return UnsupportedModelError(
        f"{name} is a GGUF file of the family {file.architecture!r}, which transformers cannot read from GGUF",
        hint=f"use the model's Hugging Face folder; GGUF files can be of {', '.join(sorted(known))}",
    )


def _single(value: MetadataValue) -> MetadataValue:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _close(found: list[float], wanted: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True))
