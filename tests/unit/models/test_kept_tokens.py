"""A stage's cache: only its own blocks keep anything, in memory that is reserved once."""

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from coterie.errors import UnsupportedModelError
from coterie.models.kept_tokens import AbsentLayer, ReservedLayer, StageCache


def config(**settings):
    shape = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
    return AutoConfig.for_model("gemma2", **{**shape, "num_key_value_heads": 1, "head_dim": 8, **settings})


def states(tokens):
    return torch.randn(2, 1, tokens, 8)


def test_own_blocks_keep_what_transformers_own_cache_keeps():
    torch.manual_seed(0)
    plain, own = DynamicCache(config=config(sliding_window=4)), StageCache(config(sliding_window=4), range(3), 9)
    for tokens in (5, 1, 1):
        keys, values = states(tokens), states(tokens)
        for block in range(3):
            for expected, found in zip(plain.update(keys, values, block), own.update(keys, values, block), strict=True):
                assert torch.equal(expected, found)
        for block in range(3):
            assert own.get_mask_sizes(1, block) == plain.get_mask_sizes(1, block)
            assert own.get_seq_length(block) == plain.get_seq_length(block)


def test_places_of_other_stages_count_along_and_keep_nothing():
    plain, part = DynamicCache(config=config(sliding_window=4)), StageCache(config(sliding_window=4), range(2, 3), 9)
    for tokens in (3, 1, 1):
        keys, values = states(tokens), states(tokens)
        assert [part.get_mask_sizes(tokens, b) for b in range(3)] == [plain.get_mask_sizes(tokens, b) for b in range(3)]
        for block in range(3):
            plain.update(keys, values, block)
        part.update(keys, values, 2)
        part.count(tokens)
        assert [part.get_seq_length(block) for block in range(3)] == [plain.get_seq_length(block) for block in range(3)]
    assert part.is_sliding == plain.is_sliding
    assert [layer.keys for layer in part.layers[:2]] == [None, None]


def test_memory_is_reserved_once_and_says_what_it_will_be():
    cache = StageCache(config(layer_types=["full_attention"] * 3), range(1, 3), 50)
    for block in (1, 2):
        cache.update(states(4), states(4), block)
    reserved = cache.layers[1].keys.data_ptr()
    assert isinstance(cache.layers[0], AbsentLayer)
    assert isinstance(cache.layers[1], ReservedLayer)
    assert cache.bytes_at(50) == 2 * 2 * (2 * 1 * 50 * 8 * 4)
    for block in (1, 2):
        cache.update(states(1), states(1), block)
    assert cache.layers[1].keys.data_ptr() == reserved
    assert cache.layers[1].keys.untyped_storage().nbytes() == 2 * 1 * 50 * 8 * 4


def test_blocks_that_cannot_be_followed_from_another_stage_are_refused():
    mixed = AutoConfig.for_model("falcon_h1", num_hidden_layers=3)  # attention and a recurrent state in one block
    with pytest.raises(UnsupportedModelError) as caught:
        StageCache(mixed, range(1), 9)
    assert "falcon_h1" in caught.value.message
    assert "one device" in caught.value.hint
    StageCache(mixed, range(3), 9)
