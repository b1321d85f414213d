"""What a row keeps while text is written is counted without weights, and is what a real stage keeps."""

import pytest

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
    profile = with_kept_tokens(profile_model(spec, memory_tokens=8, typical_tokens=8, name="tiny"), spec, tokens=tokens)
    kept = [layer.kept_bytes_per_row for layer in profile.layers]
    assert kept == [0, *[2 * HEADS * WIDTH * FLOAT32 * tokens] * 4, 0]


def test_experts_are_counted_on_real_numbers(mixtral):
    profile = profile_model(mixtral, memory_tokens=8, typical_tokens=8, name="tiny")
    counted = with_kept_tokens(profile, mixtral, tokens=20)
    assert [layer.kept_bytes_per_row for layer in counted.layers] == [0, *[2 * HEADS * WIDTH * FLOAT32 * 20] * 2, 0]
