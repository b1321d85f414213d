"""Whoever computes how many heads and neurons, the sum is the same: all allocations over two and three backends."""

import itertools

import pytest

from coterie.heads.install import install_split, remove_split
from coterie.planner.head_allocation import HeadAllocation

TOLERANCE = 5e-6


def compositions(total, parts):
    """Every way to deal `total` out to so many, nothing included."""
    for cuts in itertools.combinations(range(total + parts - 1), parts - 1):
        bounds = (-1, *cuts, total + parts - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(bounds))


@pytest.mark.parametrize(("family", "groups"), [("bert", 4), ("llama 9/3", 3), ("bloom, ALiBi", 4)])
@pytest.mark.parametrize("backends", [2, 3])
def test_every_allocation_of_heads_gives_the_same(heads, request, family, groups, backends):
    pool = request.getfixturevalue("pool" if backends == 2 else "three")
    model = heads.model(family)
    inputs = model.inputs(lengths=(7, 4, 2))
    names = [info.name for info in pool.infos]
    stage = model.stage()
    expected = heads.run(heads.in_float64(model.stage()), model, inputs)
    stage.eval()
    for counts in compositions(groups, backends):
        dealt = heads.dealt(groups, names, counts)
        assert len(install_split(stage, HeadAllocation(attention=dealt), pool).attention) == 2
        assert heads.run(stage, model, inputs).difference(expected) < TOLERANCE, counts


@pytest.mark.parametrize("family", ["bert", "llama 9/3"])
def test_neurons_may_be_dealt_out_in_any_way(heads, three, family):
    model = heads.model(family)
    inputs = model.inputs(lengths=(7, 4, 2))
    names = [info.name for info in three.infos]
    stage = model.stage()
    stage.eval()
    expected = heads.run(heads.in_float64(model.stage()), model, inputs)
    for counts in [(40, 0, 0), (0, 40, 0), (0, 0, 40), (1, 38, 1), (17, 1, 22), (0, 39, 1), (13, 13, 14)]:
        dealt = heads.dealt(40, names, counts)
        assert len(install_split(stage, HeadAllocation(neurons=dealt), three).neurons) == 2
        assert heads.run(stage, model, inputs).difference(expected) < TOLERANCE, counts


@pytest.mark.parametrize("family", ["bert", "llama 9/3", "gpt2, transposed and fused"])
def test_head_by_head_gives_the_same_as_all_at_once(heads, pool, family):
    model = heads.model(family)
    inputs = model.inputs(lengths=(7, 4, 2))
    groups = 3 if family == "llama 9/3" else 4
    names = [info.name for info in pool.infos]
    split, unsplit = model.stage(), model.stage()
    dealt = heads.dealt(groups, names, (groups - 2, 2), strategy="each")
    install_split(split, HeadAllocation(attention=dealt), pool)
    assert heads.run(split, model, inputs).difference(heads.run(unsplit, model, inputs)) < TOLERANCE


def test_a_stage_is_as_before_when_its_split_is_removed(heads, pool):
    model = heads.model("bert")
    inputs = model.inputs()
    stage, unsplit = model.stage(), model.stage()
    names = list(stage.module.state_dict())
    forwards = {name: vars(module).get("forward") for name, module in stage.module.named_modules()}
    heads.split(stage, pool)
    assert list(stage.module.state_dict()) == names
    split = heads.run(stage, model, inputs)
    remove_split(stage, pool)
    assert {name: vars(module).get("forward") for name, module in stage.module.named_modules()} == forwards
    expected = heads.run(unsplit, model, inputs)
    again = heads.run(stage, model, inputs)
    assert again.difference(expected) == 0
    assert split.difference(expected) < TOLERANCE
