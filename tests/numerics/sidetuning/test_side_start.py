"""Before the first step a side model computes what the frozen backbone computes alone."""

import torch

from coterie.jobs.side_spec import SideSpec
from coterie.models import RandomKey, build_stage
from coterie.sidetuning.readout import TokenSelector

SIDE = SideSpec(rank=4)


def test_hidden_states_and_logits_are_bit_for_bit_those_of_the_backbone_alone(case):
    model, batch = case.side_model(SIDE), case.taps(SIDE)
    last = batch.taps[:, -1].contiguous()
    assert torch.equal(model.hidden(batch.taps), last)
    alone = build_stage(case.spec, 4, 5, case.weights)
    alone.eval()
    ids = torch.zeros(len(last), 1, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        wanted = alone.forward(inputs, last.unsqueeze(1), RandomKey(seed=0, step=0, micro_batch=0))
    assert torch.equal(model.logits(batch), wanted.reshape(len(last), -1))


def test_logits_are_those_of_the_plain_model_at_the_selected_tokens(case):
    model, batch = case.side_model(SIDE), case.taps(SIDE)
    selection = TokenSelector(case.spec, SIDE).select(case.inputs, case.labels)
    with torch.no_grad():
        plain = case.plain(**case.inputs).logits
    wanted = selection.gather(plain) if plain.ndim == 3 else plain[selection.rows]
    # Matrix products of other shapes may round in another way; on most machines and models they do not.
    torch.testing.assert_close(model.logits(batch), wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


def test_for_prediction_the_token_that_the_model_reads_is_selected_in_every_row(case):
    selection = TokenSelector(case.spec, SIDE).select(case.inputs, None)
    batch_rows, tokens = case.inputs["input_ids"].shape
    with torch.no_grad():
        plain = case.plain(**case.inputs).logits
    if plain.ndim == 3:
        assert selection.counts.tolist() == case.inputs["attention_mask"].sum(1).tolist()
        return
    assert selection.counts.tolist() == [1] * batch_rows
    # The logits change with the selected tokens' last hidden states, and with no other's.
    stage = build_stage(case.spec, 4, 5, case.weights)
    stage.eval()
    hidden = torch.randn(batch_rows, tokens, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = stage.forward(case.inputs, hidden, RandomKey(seed=0, step=0, micro_batch=0))
    (gradient,) = torch.autograd.grad(logits.square().sum(), hidden)
    read = gradient.abs().sum(-1) > 0
    assert read.nonzero().tolist() == torch.stack([selection.rows, selection.positions], dim=1).tolist()
