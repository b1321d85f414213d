"""Adapters, frozen weights, recomputation and what is kept of a forward, with blocks that are split."""

import pytest
import torch

from coterie.backends.numpy_backend import NumpyBackend
from coterie.heads.pool import BackendPool

TOLERANCE = 5e-6
FUSIONS = (
    "bert",
    "distilbert",
    "llama 9/3",
    "phi3, fused",
    "gpt2, transposed and fused",
    "gpt-neox, fused by head, partly turned",
    "bloom, ALiBi",
    "opt",
)
every_fusion = pytest.mark.parametrize("family", FUSIONS)
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")


class Watching(NumpyBackend):
    """Counts what it is asked for and what it still keeps."""

    def __init__(self):
        super().__init__()
        self.loads = 0
        self.needs = []
        self.kept = []

    def load(self, shape, weights):
        self.loads += 1
        return super().load(shape, weights)

    def forward(self, loaded, inputs, *, inner=False, keep=True):
        outputs, saved = super().forward(loaded, inputs, inner=inner, keep=keep)
        self.kept.append(saved)
        return outputs, saved

    def backward(self, saved, gradient, need, *, inner_gradient=None):
        self.needs.append(need)
        return super().backward(saved, gradient, need, inner_gradient=inner_gradient)

    @property
    def alive(self):
        return sum(bool(saved.kept) for saved in self.kept)


@pytest.fixture
def watching():
    return Watching()


@pytest.fixture
def watched(watching):
    with BackendPool([watching]) as pool:
        yield pool


@every_fusion
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_adapters_with_dropout_train_as_in_the_unsplit_stage(heads, pool, family, recompute):
    model = heads.lora(family)
    inputs = model.inputs(lengths=(7, 4, 2))
    split, unsplit = model.stage(), model.stage()
    assert not heads.split(split, pool).unsplit
    got = heads.run(split, model, inputs, recompute=recompute)
    expected = heads.run(unsplit, model, inputs)
    assert all(float(gradient.norm()) > 0 for gradient in expected.gradients.values())
    assert got.difference(expected) < TOLERANCE


@pytest.mark.parametrize(
    "targets", [("query",), ("value", "output.dense"), ("intermediate.dense",), ("key", "attention.output.dense")]
)
def test_any_layers_may_have_adapters(heads, pool, targets):
    model = heads.lora("bert", target_modules=targets, variant="rslora")
    inputs = model.inputs(lengths=(7, 4, 2))
    split, unsplit = model.stage(), model.stage()
    assert not heads.split(split, pool).unsplit
    assert heads.run(split, model, inputs).difference(heads.run(unsplit, model, inputs)) < TOLERANCE


def test_of_a_frozen_layer_backends_give_no_gradients_of_weights_and_load_them_once(heads, watching, watched):
    model = heads.lora("bert")
    inputs = model.inputs()
    stage, unsplit = model.stage(), model.stage()
    heads.split(stage, watched)
    loads = watching.loads
    for _ in range(3):
        got = heads.run(stage, model, inputs)
    assert watching.loads == loads == 4, "two parts of two blocks, loaded for their trial"
    assert watching.needs
    assert not any(need.weights for need in watching.needs)
    assert got.difference(heads.run(unsplit, model, inputs)) < TOLERANCE


@pytest.mark.parametrize("method", ["bitfit", "head"])
def test_with_a_frozen_backbone_what_is_trained_gets_its_gradients(heads, pool, method):
    model = heads.model("bert", method=method)
    inputs = model.inputs(lengths=(7, 4, 2))
    split, unsplit = model.stage(), model.stage()
    heads.split(split, pool)
    got, expected = heads.run(split, model, inputs), heads.run(unsplit, model, inputs)
    assert expected.gradients
    assert got.difference(expected) < TOLERANCE


@pytest.mark.parametrize("family", ["bert", "llama 9/3", "gpt2, transposed and fused", "opt"])
def test_recomputed_blocks_give_the_same_gradients(heads, pool, family):
    model = heads.model(family)
    inputs = model.inputs(lengths=(7, 4, 2))
    split, unsplit = model.stage(), model.stage()
    heads.split(split, pool)
    got = heads.run(split, model, inputs, recompute=True)
    assert got.difference(heads.run(unsplit, model, inputs)) < TOLERANCE


def test_backends_keep_nothing_of_a_forward_that_will_be_recomputed(heads, watching, watched):
    model = heads.model("bert")
    inputs = model.inputs()
    stage = model.stage()
    heads.split(stage, watched)
    output = stage.forward(inputs, model.hidden().requires_grad_(), heads.key, recompute=True)
    assert watching.alive <= 1, "the last part is released by the next job"
    output.sum().backward()
    with torch.no_grad():
        stage.forward(inputs, model.hidden(), heads.key)
    assert watching.alive == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_a_backward_keeps_nothing(heads, watching, watched, mode):
    model = heads.model("bert")
    inputs = model.inputs(lengths=(7, 4, 2))
    stage, unsplit = model.stage(), model.stage()
    heads.split(stage, watched)
    stage.eval()
    unsplit.eval()
    with mode():
        got = stage.forward(inputs, model.hidden(), heads.key)
        expected = unsplit.forward(inputs, model.hidden(), heads.key)
    assert watching.alive == 0
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_forward_whose_backward_never_comes_is_released(heads, watching, watched):
    model = heads.model("bert")
    stage = model.stage()
    heads.split(stage, watched)
    output = stage.forward(model.inputs(), model.hidden(), heads.key)
    assert watching.alive == 4
    del output
    with torch.no_grad():
        stage.forward(model.inputs(), model.hidden(), heads.key)
    assert watching.alive == 0


def test_the_first_stage_trains_its_embedding_through_split_blocks(heads, pool):
    model = heads.model("llama 9/3")
    inputs = model.inputs(lengths=(7, 4, 2))
    gradients = []
    for shared in (True, False):
        stage = model.stage(0)
        if shared:
            heads.split(stage, pool)
        stage.forward(inputs, None, heads.key)[inputs["attention_mask"].bool()].square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in stage.trainable().items()})
    for name, expected in gradients[1].items():
        assert float((gradients[0][name] - expected).norm() / expected.norm()) < TOLERANCE, name


def test_updates_in_place_reach_the_backends(heads, watched):
    model = heads.model("llama 9/3")
    inputs = model.inputs()
    stages = [model.stage(), model.stage()]
    heads.split(stages[0], watched)
    for _ in range(3):
        got, expected = (heads.run(stage, model, inputs) for stage in stages)
        assert got.difference(expected) < TOLERANCE
        for stage in stages:
            with torch.no_grad():
                for parameter in stage.trainable().values():
                    parameter.sub_(parameter.grad, alpha=1e-3)
