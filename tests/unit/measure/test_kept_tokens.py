"""What a row keeps while text is written is counted without weights, and is what a real stage keeps."""

import pytest
import torch
from transformers import Lfm2Config, MambaConfig

from coterie.jobs.model_spec import ModelSpec
from coterie.measure import fake_stage, kept_tokens
from coterie.measure.kept_tokens import with_kept_tokens
from coterie.measure.model_profile import profile_model

HEADS, WIDTH, FLOAT32 = 2, 8, 4


@pytest.mark.parametrize(("tokens", "tiny"), [(10, False), (100, False), (100, True)])
def test_full_attention_keeps_keys_and_values_of_every_token(llama, tokens, tiny, monkeypatch):
    if not tiny:
        monkeypatch.setattr(fake_stage, "_FEW_PRODUCTS", 0)
    monkeypatch.setattr(kept_tokens, "build_fake_stage" if tiny else "build_stage", None)  # the other kind is not built
    spec = llama()
    before = torch.get_rng_state()
    profile = with_kept_tokens(profile_model(spec, memory_tokens=8, typical_tokens=8, name="tiny"), spec, tokens=tokens)
    kept = [layer.kept_bytes_per_row for layer in profile.layers]
    assert torch.equal(torch.get_rng_state(), before)
    assert kept == [0, *[2 * HEADS * WIDTH * FLOAT32 * tokens] * 4, 0]


def test_experts_are_counted_on_real_numbers(mixtral):
    profile = profile_model(mixtral, memory_tokens=8, typical_tokens=8, name="tiny")
    counted = with_kept_tokens(profile, mixtral, tokens=20)
    assert [layer.kept_bytes_per_row for layer in counted.layers] == [0, *[2 * HEADS * WIDTH * FLOAT32 * 20] * 2, 0]


def test_blocks_that_keep_a_state_of_one_size_keep_it_once_for_any_number_of_tokens():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "intermediate_size": 64}
    mixed = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    for config, kept in (
        (MambaConfig(**sizes, state_size=4, conv_kernel=3), [lambda _: 64 * (3 + 4)] * 3),
        (
            Lfm2Config(**sizes, **heads, **mixed),
            [lambda _: 32 * 3, lambda tokens: 2 * HEADS * WIDTH * tokens, lambda _: 32 * 3],
        ),
    ):
        spec = ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForCausalLM")
        profile = profile_model(spec, memory_tokens=8, typical_tokens=8, name="tiny")
        for tokens in (10, 40):
            counted = with_kept_tokens(profile, spec, tokens=tokens).layers
            assert [layer.kept_bytes_per_row for layer in counted] == [0, *(FLOAT32 * of(tokens) for of in kept), 0]
