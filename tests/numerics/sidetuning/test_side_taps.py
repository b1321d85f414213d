"""Taps of a backbone, whole or cut, are what its blocks return in the plain model, bit for bit."""

import itertools

import pytest
import torch

from coterie.jobs.side_spec import SideSpec
from coterie.models import RandomKey, build_stage
from coterie.sidetuning.activations import ActivationBatch, join_layers
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.selection import TokenSelection
from coterie.sidetuning.taps import TappedStage

SIDE = SideSpec(rank=4)
KEY = RandomKey(seed=0, step=0, micro_batch=0)


def plain_layers(case):
    """Every block's output [B, T, D] in the plain model."""
    seen = []

    def keep(_block, _inputs, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [
        block.register_forward_hook(keep) for block in case.plain.get_submodule(case.anatomy.blocks_name).children()
    ]
    with torch.no_grad():
        case.plain(**case.inputs)
    for handle in handles:
        handle.remove()
    return seen


def test_taps_are_the_plain_models_block_outputs_at_the_selected_tokens(case):
    batch = case.taps(SIDE)
    selection = TokenSelector(case.spec, SIDE).select(case.inputs, case.labels)
    wanted = torch.stack([hidden[selection.rows, selection.positions] for hidden in plain_layers(case)], dim=1)
    assert batch.layers == (1, 2, 3)
    assert 0 < batch.tokens < case.inputs["attention_mask"].sum()
    assert torch.equal(batch.taps, wanted)


@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 3, 5)], ids=str)
def test_taps_of_a_cut_backbone_are_those_of_the_whole_bit_for_bit(case, cuts):
    whole, cut = case.taps(SIDE), case.taps(SIDE, cuts=cuts)
    assert cut.layers == whole.layers
    assert torch.equal(cut.taps, whole.taps)


def test_a_ladder_that_starts_higher_taps_only_what_is_above(side_case):
    case = side_case("llama labels")
    high = case.taps(SideSpec(first_layer=3), cuts=(0, 2, 4))
    assert high.layers == (3,)
    assert torch.equal(high.taps, case.taps(SIDE).taps[:, 2:])


def test_with_all_tokens_the_selected_ones_are_among_them(case):
    chosen, everything = case.taps(SIDE), case.taps(SideSpec(rank=4, selects_tokens=False))
    assert everything.tokens == case.inputs["attention_mask"].sum()
    assert torch.equal(everything.loss_taps, chosen.taps)
    assert torch.equal(everything.labels, chosen.labels)
    assert torch.equal(everything.loss_counts, chosen.counts)


def test_parts_of_stages_join_in_any_order(side_case):
    case = side_case("gpt2 text")
    selection = TokenSelector(case.spec, SIDE).select(case.inputs, case.labels)
    hidden, parts = None, []
    for start, stop in itertools.pairwise((0, 1, 3, 4)):
        stage = TappedStage(build_stage(case.spec, start, stop, case.weights))
        hidden, taps = stage.forward(case.inputs, hidden, selection)
        rows = len(selection.rows)
        own = torch.stack(list(taps.values()), dim=1) if taps else torch.empty(rows, 0, 32)
        parts.append(ActivationBatch(samples=torch.arange(4), counts=selection.counts, layers=stage.layers, taps=own))
    assert [part.layers for part in parts] == [(), (1, 2), (3,)]
    for order in itertools.permutations(parts):
        joined = join_layers(order)
        assert joined.layers == (1, 2, 3)
        assert torch.equal(joined.taps, case.taps(SIDE).taps)


def test_a_forward_that_nobody_tapped_keeps_nothing(side_case):
    case = side_case("bert tags")
    tapped = TappedStage(build_stage(case.spec, 0, 4, case.weights))
    one = torch.tensor([1])
    tapped.select(TokenSelection(rows=one, positions=one, counts=torch.tensor([0, 1, 0, 0])))
    with torch.no_grad():
        tapped.stage.forward(case.inputs, None, KEY)
    assert {layer: tap.shape for layer, tap in tapped.taken().items()} == dict.fromkeys((1, 2, 3), (1, 32))
    assert tapped.taken() == {}
    tapped.select(None)
    with torch.no_grad():
        tapped.stage.forward(case.inputs, None, KEY)
    assert tapped.taken() == {}
