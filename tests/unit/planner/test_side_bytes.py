"""Bytes of side-tuning and its baselines: METHODS.md's derived figures to the byte, the paper's own beside them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import OPTConfig

from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_spec import SideSpec
from coterie.models import describe
from coterie.planner.side_bytes import (
    CODECS,
    Backbone,
    TokenCounts,
    Traffic,
    baseline_bytes,
    cache_bytes,
    cached_token_bytes,
    side_network_bytes,
    side_parameters,
    side_run_bytes,
    taps_bytes,
    upload_bytes,
)
from coterie.sidetuning.cached_rows import RowCoder
from coterie.sidetuning.side_network import SideNetwork
from coterie.tensors.codecs import encode
from coterie.units import GIB

OPT = Backbone(blocks=24, width=2048)
BATCH = TokenCounts(padded=8 * 256, real=8 * 256, selected=8)
FP16 = SideSpec(upload="float16")
ALL_TOKENS = SideSpec(upload="float16", selects_tokens=False)
SCALE = 4  # of a float16 tensor on the wire


def test_the_shape_is_that_of_the_real_model_counted_without_weights():
    config = OPTConfig(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, word_embed_proj_dim=2048
    )
    anatomy = describe(ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForCausalLM", method="none"))
    assert Backbone(blocks=anatomy.unit_count - 2, width=config.hidden_size) == OPT
    assert sum(math.prod(shape) for shape in anatomy.shapes.values()) == pytest.approx(1.3e9, rel=0.02)


def rows(count: int) -> TokenCounts:
    return TokenCounts(padded=256 * count, real=256 * count, selected=count)


def test_mobillm_uploads_every_token_of_a_batch():
    up = baseline_bytes("mobillm", BATCH, OPT, "float16").up_bytes
    assert up - SCALE == 8 * 256 * 24 * 2048 * 2 == 201_326_592
    assert up / 1e6 == pytest.approx(200.4, rel=0.01)  # the paper's Table 1


def test_eco_uploads_a_token_of_each_row_and_so_less_by_the_sequence_length():
    up = upload_bytes(BATCH, OPT, FP16)
    assert up - SCALE == 8 * 1 * 24 * 2048 * 2 == 786_432
    assert upload_bytes(BATCH, OPT, ALL_TOKENS) - SCALE == 256 * (up - SCALE)


def test_split_learning_crosses_two_cuts_in_both_directions():
    traffic = baseline_bytes("bitfit-split", BATCH, OPT, "float16")
    assert traffic.total_bytes - 4 * SCALE == 4 * 8 * 256 * 2048 * 2 == 33_554_432
    assert traffic.up_bytes == traffic.down_bytes
    assert traffic.total_bytes / 1e6 == pytest.approx(33.4, rel=0.01)  # the paper's Table 1


@pytest.mark.parametrize(
    ("samples", "side", "exact", "gib", "paper"),
    [
        (2_490, FP16, 2_490 * 24 * 2048 * 2, 0.228, 0.23),  # RTE
        (2_490, ALL_TOKENS, 2_490 * 256 * 24 * 2048 * 2, 58.4, 58.88),  # RTE without the token selector
        (67_349, FP16, 67_349 * 24 * 2048 * 2, 6.17, 6.21),  # SST-2
    ],
)
def test_the_cache_holds_what_was_uploaded_once(samples, side, exact, gib, paper):
    size = cache_bytes(rows(samples), OPT, side)
    tokens = samples if side.selects_tokens else 256 * samples
    assert size - tokens * 24 * SCALE == exact  # a scale for each token and layer
    assert size / GIB == pytest.approx(gib, rel=0.001)
    assert size / GIB == pytest.approx(paper, rel=0.01)  # the paper's Table 6


def test_the_devices_pass_over_the_data_once_instead_of_once_for_each_epoch():
    eco = side_run_bytes(rows(100), 13, OPT, FP16)
    live = side_run_bytes(rows(100), 13, OPT, SideSpec(two_phases=False))
    assert (eco.device_passes, live.device_passes) == (1, 13)
    assert live.traffic.up_bytes == 13 * eco.traffic.up_bytes
    assert live.cache_bytes == 0
    assert eco.cache_bytes == eco.traffic.up_bytes + (100 * 24 - 1) * SCALE


def test_training_on_the_device_alone_sends_nothing():
    assert baseline_bytes("local", BATCH, OPT, "float16") == Traffic()


@pytest.mark.parametrize(
    ("upload", "scales", "values"),
    [
        ("float32", 0, 4 * 7 * 3 * 96),
        ("float16", 4, 2 * 7 * 3 * 96),
        ("int8", 4 * 7 * 3, 7 * 3 * 96),  # a scale for each vector
        ("int4", 4 * 7 * 3 * 2, 7 * 3 * 48),  # one for each 64 numbers of a vector, or fewer at its end
    ],
)
def test_every_type_of_upload_counts_its_scales(upload, scales, values):
    assert taps_bytes(7, 3, 96, upload) == scales + values


@pytest.mark.parametrize("upload", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize(("taps", "width"), [(24, 2048), (6, 384), (3, 33), (1, 5)])
def test_a_cached_token_takes_what_the_cache_really_writes(upload, taps, width):
    assert cached_token_bytes(taps, width, upload) == RowCoder(taps, width, upload).row_bytes


@pytest.mark.parametrize("upload", ["float32", "float16", "int8", "int4"])
def test_an_upload_takes_what_the_codec_really_writes(upload):
    _, encoded = encode(torch.randn(5, 3, 33, generator=torch.Generator().manual_seed(0)), "taps", CODECS[upload])
    assert taps_bytes(5, 3, 33, upload) == encoded.nbytes


def test_a_ladder_that_starts_higher_sends_and_holds_less():
    whole, upper = SideSpec(), SideSpec(first_layer=13)
    assert OPT.taps(upper) == 12
    assert 2 * (upload_bytes(BATCH, OPT, upper) - SCALE) == upload_bytes(BATCH, OPT, whole) - SCALE
    assert 2 * side_parameters(OPT, upper) == side_parameters(OPT, whole)


def test_a_side_network_is_two_thin_matrices_a_norm_and_a_gate_for_each_block():
    backbone, side = Backbone(blocks=2, width=10), SideSpec(rank=3)
    block = 10 * 3 + 3 * 10 + (10 + 10) + 1
    assert side_parameters(backbone, side) == 2 * block
    assert side_network_bytes(backbone, side, task_parameters=5) == 4 * (2 * block + 5)


@pytest.mark.parametrize(("blocks", "width", "rank", "first"), [(3, 8, 2, 1), (5, 16, 4, 3), (1, 8, 2, 1)])
def test_as_many_numbers_are_counted_as_the_side_network_has(blocks, width, rank, first):
    side = SideSpec(rank=rank, first_layer=first)
    network = SideNetwork(blocks, width, side, seed=0)
    assert side_parameters(Backbone(blocks=blocks, width=width), side) == sum(p.numel() for p in network.parameters())


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 30), st.integers(1, 200))
def test_without_the_selector_never_less_is_sent(count, length, blocks, width):
    tokens = TokenCounts(padded=count * length, real=count * length, selected=count)
    backbone = Backbone(blocks=blocks, width=width)
    assert upload_bytes(tokens, backbone, FP16) <= upload_bytes(tokens, backbone, ALL_TOKENS)
    mobillm = baseline_bytes("mobillm", tokens, backbone, "float16")
    assert upload_bytes(tokens, backbone, ALL_TOKENS) == mobillm.up_bytes
