"""Families that can be exported to GGUF: their names and numbers there, and in which order llama.cpp holds rows."""

from typing import TYPE_CHECKING, Any

import torch

from coterie.errors import UnsupportedModelError
from coterie.models.gguf_config import llama3_factors

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PretrainedConfig

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model types of transformers that can be exported, and llama.cpp's architectures."""

_PERMUTED = ("llama",)
"""Architectures whose rotary halves llama.cpp holds interleaved."""

_ROPE_FACTORS = "rope_freqs.weight"


def architecture_of(config: "PretrainedConfig") -> str:
    """llama.cpp's architecture for a model.

    Raises:
        UnsupportedModelError: The family, its activation or its positions cannot be written.
    """
    architecture = FAMILIES.get(config.model_type)
    if architecture is None:
        raise UnsupportedModelError(
            f"{config.model_type} models cannot be written to GGUF here",
            hint=f"supported are {', '.join(FAMILIES)}; or export a folder for llama.cpp's convert_hf_to_gguf.py",
        )
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(
            f"the model's activation is {activation}, and llama.cpp has silu in this family", hint="export a folder"
        )
    kind = _rope(config).get("rope_type", "default")
    if kind not in {"default", "llama3"} or (kind == "llama3" and architecture != "llama"):
        raise UnsupportedModelError(
            f"the model scales its positions ({kind}), which cannot be written to GGUF here",
            hint="export a folder for llama.cpp's convert_hf_to_gguf.py",
        )
    return architecture


def write_settings(writer: "GGUFWriter", config: "PretrainedConfig") -> None:
    """Write the numbers of the model."""
    width = head_width(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def extra_tensors(config: "PretrainedConfig") -> dict[str, torch.Tensor]:
    """Tensors that the file needs and the model computes: Llama 3.1's factors of the rotary frequencies."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return {}
    return {_ROPE_FACTORS: torch.tensor(llama3_factors(rope, head_width(config)), dtype=torch.float32)}


def as_stored(architecture: str, name: str, tensor: torch.Tensor, config: "PretrainedConfig") -> torch.Tensor:
    """A tensor in llama.cpp's order: rows of rotary queries and keys interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or architecture not in _PERMUTED:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def head_width(config: "PretrainedConfig") -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _context(config: "PretrainedConfig") -> int:
    """Tokens of a row; not more than the attention's window, which llama.cpp does not apply in these families."""
    window = getattr(config, "sliding_window", None)
    return int(min(config.max_position_embeddings, window or config.max_position_embeddings))


def _rope(config: "PretrainedConfig") -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})
