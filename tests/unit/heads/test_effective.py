"""Weights read out of linear layers however they are fused, and versions that tell when they have changed."""

import gc

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from coterie.heads.effective import Projection, Projections, WeightVersion

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def product(weight, bias):
    return nn.functional.linear(X, weight, bias)


def test_layers_apart_give_their_own_weights():
    layers = [nn.Linear(8, width) for width in (8, 4, 4)]
    firsts = Projections(layers, "apart", (8, 4, 4))
    assert firsts.biased
    for layer, weight, bias in zip(layers, firsts.weights(), firsts.biases(), strict=True):
        assert weight is layer.weight
        assert bias is layer.bias


def test_a_layer_without_a_bias_beside_others_gets_zeros():
    firsts = Projections([nn.Linear(8, 4), nn.Linear(8, 4, bias=False)], "apart", (4, 4))
    assert firsts.biases()[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_stacked_rows_are_taken_apart(kind):
    layer = kind(8, 16) if kind is nn.Linear else kind(16, 8)
    firsts = Projections([layer], "stacked", (8, 4, 4))
    parts = [product(weight, bias) for weight, bias in zip(firsts.weights(), firsts.biases(), strict=True)]
    torch.testing.assert_close(torch.cat(parts, -1), layer(X))


def test_rows_of_each_head_are_taken_apart():
    layer = nn.Linear(8, 24)
    firsts = Projections([layer], "by_head", (8, 8, 8), head_dim=4)
    parts = [product(weight, bias) for weight, bias in zip(firsts.weights(), firsts.biases(), strict=True)]
    by_head = torch.stack([part.view(2, 3, 2, 4) for part in parts], 3).flatten(2)
    torch.testing.assert_close(by_head, layer(X))


def test_gradients_reach_the_parameter_through_its_parts():
    layer = nn.Linear(8, 24)
    whole = nn.Linear(8, 24)
    whole.load_state_dict(layer.state_dict())
    firsts = Projections([layer], "by_head", (8, 8, 8), head_dim=4)
    sum(product(w, b).square().sum() for w, b in zip(firsts.weights(), firsts.biases(), strict=True)).backward()
    whole(X).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, whole.weight.grad)
    torch.testing.assert_close(layer.bias.grad, whole.bias.grad)


def test_a_parameter_put_in_its_place_is_the_one_that_is_read():
    layer = nn.Linear(8, 4)
    projection = Projection(layer)
    other = nn.Parameter(torch.zeros(4, 8))
    layer._parameters["weight"] = other
    assert projection.weight() is other


def test_layers_of_other_kinds_are_refused():
    assert Projection(nn.Bilinear(2, 2, 2)).refusal == "a layer of it is a Bilinear, which is not known here"
    assert "torch.float64" in Projection(nn.Linear(2, 2).double()).refusal


def test_a_version_is_equal_until_a_value_changes():
    weight = nn.Parameter(torch.zeros(2))
    before = WeightVersion([weight])
    assert before == WeightVersion([weight])
    assert hash(before) == hash(WeightVersion([weight]))
    with torch.no_grad():
        weight.add_(1)
    assert before != WeightVersion([weight])


def test_another_parameter_of_equal_values_is_another_version():
    assert WeightVersion([nn.Parameter(torch.zeros(2))]) != WeightVersion([nn.Parameter(torch.zeros(2))])


def test_a_version_keeps_no_parameter_alive_and_equals_nothing_once_it_is_gone():
    weight = nn.Parameter(torch.zeros(2))
    version = WeightVersion([weight])
    del weight
    gc.collect()
    assert version != WeightVersion([nn.Parameter(torch.zeros(2))])
    assert version != version.__class__(())
