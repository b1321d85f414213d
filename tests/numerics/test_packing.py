"""Rows that share a context do not see each other, for every family that may be packed."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coterie.errors import UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.models.packing import PACKABLE, check_packing
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.collate import collate
from coterie.tasks.examples import EncodedExample
from coterie.tasks.language_encoding import TokenRow, encode_tokens, pack_rows

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {**BASE, **SPECIAL}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma": HEADS,
    "gemma2": {**HEADS, "sliding_window": 4},
    "gemma3_text": {**HEADS, "sliding_window": 4, "layer_types": MIXED},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL},
    "gpt_neox": PLAIN,
    "granite": GROUPED,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
    "mixtral": {**GROUPED, "num_local_experts": 3},
    "olmo2": PLAIN,
    "phi": PLAIN,
    "phi3": PLAIN,
    "qwen2": GROUPED,
    "qwen3": HEADS,
    "qwen3_moe": {**HEADS, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {**GROUPED, "no_rope_layer_interval": 2},
    "stablelm": GROUPED,
}
REFUSED: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, **SPECIAL},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL},
    "falcon": PLAIN,
    "gpt_oss": {**HEADS, "num_local_experts": 4, "sliding_window": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 61, **SPECIAL},
}


def rows() -> list[EncodedExample]:
    draw = np.random.default_rng(5)
    lengths = (9, 4, 7, 3)
    return [encode_tokens(TokenRow(draw.integers(3, 61, n).tolist(), [True] * n), 30) for n in lengths]


def tensors(encoded: list[EncodedExample]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    arrays = {name: torch.from_numpy(array) for name, array in collate(encoded, pad_token_id=0).items()}
    return arrays, arrays.pop("labels")


def test_every_family_that_may_be_packed_is_tested_here() -> None:
    assert SETTINGS.keys() == PACKABLE


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_packed_rows_have_the_loss_and_the_gradients_of_the_rows_apart(kind: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SETTINGS[kind])).eval()
    model.config.use_cache = False
    found = []
    for encoded in (rows(), list(pack_rows(rows(), 13))):
        inputs, labels = tensors(encoded)
        model.zero_grad()
        loss = CausalLm().loss_sum(model(**inputs).logits, labels)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((len(encoded), loss.item(), gradients))

    (apart_rows, apart, apart_gradients), (packed_rows, packed, packed_gradients) = found
    assert packed_rows < apart_rows
    assert packed == pytest.approx(apart, rel=1e-5)
    for name, gradient in apart_gradients.items():
        scale = float(gradient.abs().max()) + 1e-6
        assert float((packed_gradients[name] - gradient).abs().max()) < 1e-4 * scale + 1e-6, name


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_other_families_are_refused(kind: str) -> None:
    config = AutoConfig.for_model(kind, **REFUSED[kind])
    spec = ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForCausalLM")

    with pytest.raises(UnsupportedModelError, match="packing"):
        check_packing(spec)
