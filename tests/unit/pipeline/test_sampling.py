"""Choosing the next token: greedy, or drawn so that nothing but seed, row and position matters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import TopPLogitsWarper

from coterie.errors import NonFiniteLossError
from coterie.jobs.generation_spec import GenerationSpec
from coterie.pipeline.sampling import next_tokens, uniform

GREEDY = GenerationSpec(max_new_tokens=1)
DRAWN = GenerationSpec(max_new_tokens=1, temperature=1.0, seed=3)


def test_greedy_takes_the_largest_logit_and_the_first_of_equal_ones():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    assert next_tokens(logits, GREEDY, rows=(0, 1), position=0).tolist() == [1, 0]


def test_drawn_tokens_are_as_frequent_as_they_are_probable():
    wanted = torch.tensor([0.1, 0.6, 0.3])
    logits = wanted.log().expand(4000, 3)
    found = next_tokens(logits, DRAWN, rows=range(4000), position=0).bincount(minlength=3) / 4000
    assert (found - wanted).abs().max() < 0.03


def test_a_low_temperature_is_nearly_greedy_and_a_high_one_is_not():
    logits = torch.tensor([1.0, 2.0, 1.5]).expand(500, 3)
    cold = GenerationSpec(max_new_tokens=1, temperature=0.01)
    hot = GenerationSpec(max_new_tokens=1, temperature=100.0)
    assert next_tokens(logits, cold, rows=range(500), position=0).unique().tolist() == [1]
    assert next_tokens(logits, hot, rows=range(500), position=0).bincount(minlength=3).min() > 100


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {1}), (0.6, {1}), (0.61, {1, 2}), (0.95, {0, 1, 2}), (1e-9, {1})])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    logits = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64).log().expand(300, 3)
    spec = GenerationSpec(max_new_tokens=1, temperature=1.0, top_p=top_p)
    assert set(next_tokens(logits, spec, rows=range(300), position=0).tolist()) == kept


def test_top_p_keeps_what_transformers_keeps():
    torch.manual_seed(2)
    logits = torch.randn(1, 40).double() * 3
    kept = {i for i, logit in enumerate(TopPLogitsWarper(0.8)(None, logits)[0].tolist()) if logit > float("-inf")}
    spec = GenerationSpec(max_new_tokens=1, temperature=1.0, top_p=0.8)
    drawn = set(next_tokens(logits.expand(3000, 40), spec, rows=range(3000), position=0).tolist())
    assert drawn <= kept
    assert len(kept - drawn) <= 2


@given(rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=6), position=st.integers(0, 1000))
def test_a_draw_depends_on_its_row_and_position_not_on_the_batch(rows, position):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 11, generator=generator)
    together = next_tokens(logits.expand(len(rows), 11), DRAWN, rows=rows, position=position).tolist()
    assert together == [next_tokens(logits, DRAWN, rows=(row,), position=position).item() for row in rows]


def test_draws_differ_between_seeds_rows_and_positions():
    draws = [uniform(seed, row, position) for seed in range(3) for row in range(3) for position in range(3)]
    assert len(set(draws)) == 27
    assert all(0 <= draw < 1 for draw in draws)


def test_a_logit_that_is_not_a_number_is_an_error():
    with pytest.raises(NonFiniteLossError, match="token 5"):
        next_tokens(torch.tensor([[0.0, float("nan")]]), GREEDY, rows=(0,), position=4)
