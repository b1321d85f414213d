"""Masks of every kind as one additive bias, made once for all blocks that get the same mask."""

import numpy as np
import pytest
import torch

from coterie.heads.score_bias import ScoreBias

LEAST = torch.finfo(torch.float32).min
SIZES = (2, 3)


@pytest.fixture
def made():
    return ScoreBias()


def test_without_a_mask_nothing_is_added(made):
    assert made.of(None, None, SIZES, causal=False).bias is None


def test_without_a_mask_a_causal_block_hides_what_comes_later(made):
    bias = made.of(None, None, SIZES, causal=True).bias
    assert bias.tolist() == [[[[0, LEAST, LEAST], [0, 0, LEAST], [0, 0, 0]]]]


def test_what_is_false_is_hidden(made):
    mask = torch.tensor([[True, True, False], [True, False, False]])[:, None, None]
    bias, sees_nothing = made.of(mask, None, SIZES, causal=True)
    assert bias.tolist() == [[[[0, 0, LEAST]]], [[[0, LEAST, LEAST]]]]
    assert not sees_nothing


def test_a_mask_spread_over_all_tokens_stays_one_row(made):
    mask = torch.tensor([[True, True, False], [True, False, False]])[:, None, None].expand(2, 1, 3, 3)
    assert made.of(mask, None, SIZES, causal=False).bias.shape == (2, 1, 1, 3)


def test_a_token_that_sees_nothing_is_told(made):
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    mask[1, 0, 0] = False
    assert made.of(mask, None, SIZES, causal=False).sees_nothing


def test_infinities_become_the_least_finite_number(made):
    mask = torch.tensor([0.0, -1.5, -torch.inf]).expand(1, 1, 3, 3).clone()
    assert made.of(mask, None, SIZES, causal=False).bias[0, 0, 0].tolist() == [0, -1.5, LEAST]


def test_alibi_is_added_head_by_head_and_stays_finite(made):
    alibi = -torch.arange(12.0).view(4, 1, 3)
    mask = torch.zeros(2, 1, 3, 3)
    mask[..., 2] = LEAST
    bias = made.of(mask, alibi, SIZES, causal=False).bias
    assert bias.shape == (2, 2, 3, 3)
    assert np.isfinite(bias).all()
    assert bias[1, 1, 0].tolist() == [-9, -10, LEAST]


def test_the_same_mask_is_made_into_a_bias_once(made):
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    first = made.of(mask, None, SIZES, causal=False).bias
    assert made.of(mask, None, SIZES, causal=False).bias is first
    mask[0, 0, 2, 0] = False
    assert made.of(mask, None, SIZES, causal=False).bias is not first


def test_a_mask_that_is_gone_is_not_taken_for_no_mask(made):
    mask = torch.zeros(2, 1, 3, 3)
    mask[..., 2] = LEAST
    assert made.of(mask, None, SIZES, causal=False).bias is not None
    del mask
    assert made.of(None, None, SIZES, causal=False).bias is None


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(2, 1, 3, 5), torch.ones(2, 1, 3, 3, dtype=torch.long)])
def test_masks_of_other_kinds_are_not_guessed_at(made, mask):
    assert made.of(mask, None, SIZES, causal=False) is None


def test_masks_of_inference_mode_are_made_anew_each_time(made):
    with torch.inference_mode():
        mask = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
        first = made.of(mask, None, SIZES, causal=False).bias
        mask[0, 0, 2, 0] = False
        assert made.of(mask, None, SIZES, causal=False).bias[0, 0, 2].tolist() == [LEAST, 0, 0]
    assert first[0, 0, 2].tolist() == [0, 0, 0]
