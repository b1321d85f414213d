"""Tiny random models as GGUF files, written without any of the code under test."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
"""Widths that divide into ggml's blocks of 32."""

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "Ġ a", "h e", "1 2", "Ġt he")
TOKENS = (*SPECIAL, *ALPHABET, *("".join(merge.split()) for merge in MERGES))
"""A byte-level vocabulary with a few merges; `12` is one that splitting digit by digit never lets happen."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SHAPE, "num_key_value_heads": 2}),
    "llama-tied": ("llama", {**SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**SHAPE, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {**SHAPE, "num_key_value_heads": 2, "head_dim": 32}),
    "gemma2": ("gemma2", {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}),
    "phi3": ("phi3", {**SHAPE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "lfm2": (
        "lfm2",
        {
            **SHAPE,
            "num_key_value_heads": 2,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 48}),
    "qwen3moe": (
        "qwen3_moe",
        {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}  # fmt: skip
"""llama.cpp's architecture (before the first dash), transformers' model type, and its tiny settings."""

MakeGguf = Callable[..., Path]


@pytest.fixture(scope="session")
def make_gguf(tmp_path_factory: pytest.TempPathFactory) -> MakeGguf:
    """Writes a family's tiny model in a type of ggml's; one file per pair, kept for the session."""
    made: dict[tuple[str, str, str], Path] = {}

    def make(family: str, kind: str = "F32", pre: str = "smollm") -> Path:
        if (family, kind, pre) not in made:
            path = tmp_path_factory.mktemp(family) / f"{family}-{kind}.gguf"
            write_gguf(path, family, gguf.GGMLQuantizationType[kind], pre)
            made[family, kind, pre] = path
        return made[family, kind, pre]

    return make


def write_gguf(path: Path, family: str, kind: gguf.GGMLQuantizationType, pre: str) -> None:
    architecture = family.split("-", maxsplit=1)[0]
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{"vocab_size": len(TOKENS), "max_position_embeddings": 48, **settings})
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, architecture)
    _write_settings(writer, config)
    write_tokenizer(writer, pre)
    for name, tensor in _stored(architecture, config, model):
        stored = kind if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )


def _write_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if config.model_type == "lfm2":
        writer.add_layer_norm_rms_eps(config.norm_eps)
        kinds = zip(config.layer_types, itertools.repeat(config.num_key_value_heads), strict=False)
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind, heads in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
        writer.add_vocab_size(config.vocab_size)
    elif hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_head_count_kv(config.num_key_value_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(width)
        writer.add_rope_dimension_count(width)
        writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
        writer.add_vocab_size(config.vocab_size)
    else:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _stored(architecture: str, config: Any, model: Any) -> list[tuple[str, np.ndarray]]:
    """The model's tensors under llama.cpp's names and in its shapes. Whether rows are permuted does not matter here."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stored = []
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.endswith("gate_up_proj") and values.ndim == 3:
            block = f"blk.{name.split('.')[2]}"
            gate, up = np.split(values, 2, axis=1)
            stored += [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]
            continue
        if architecture == "gpt2" and name.endswith(".weight") and ("c_" in name):
            values = values.T
        if name.endswith("conv.conv.weight"):
            values = values.squeeze(1)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        stored.append(
            (
                found if "." in found and found.rpartition(".")[2] in {"weight", "bias"} else f"{found}.weight",
                np.ascontiguousarray(values),
            )
        )
    return stored
