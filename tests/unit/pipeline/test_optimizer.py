from collections.abc import Iterator

import pytest
import torch
from torch import nn

from coterie.errors import CheckpointError
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.pipeline.optimizer import StageOptimizer

SPECS = {
    "adamw": OptimizerSpec(name="adamw", weight_decay=0.1),
    "sgd with momentum": OptimizerSpec(name="sgd", momentum=0.9, weight_decay=0.1),
    "plain sgd": OptimizerSpec(name="sgd", weight_decay=0.0),
}


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"dense.weight": (5, 3), "dense.bias": (5,), "norm.weight": (3,), "unused": (2, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def _gradients(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"dense.weight": (5, 3), "dense.bias": (5,), "norm.weight": (3,)}
    for _ in range(steps):
        yield {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _torch_optimizer(spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=spec.betas, eps=spec.epsilon, fused=True)
    return torch.optim.SGD(groups, lr=0.0, momentum=spec.momentum)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_updates_equal_torchs_optimizer_bit_for_bit_with_a_changing_rate(spec: OptimizerSpec) -> None:
    ours, theirs = _parameters(), _parameters()
    optimizer, reference = StageOptimizer(spec), _torch_optimizer(spec, theirs)
    for step, gradients in enumerate(_gradients(6)):
        rate = 0.01 * (step + 1)
        optimizer.apply(ours, gradients, rate)
        for name, gradient in gradients.items():
            theirs[name].grad = gradient.clone()
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["norm.weight"], _parameters()["norm.weight"])
    assert torch.equal(ours["unused"], _parameters()["unused"])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_saved_state_continues_in_another_optimizer_as_if_nothing_had_happened(spec: OptimizerSpec) -> None:
    through, split = _parameters(), _parameters()
    first, second = StageOptimizer(spec), StageOptimizer(spec)
    uninterrupted = StageOptimizer(spec)
    for gradients in _gradients(4):
        uninterrupted.apply(through, gradients, 0.01)
    for step, gradients in enumerate(_gradients(4)):
        if step == 2:
            second.load_state(first.state(), split)
        (first if step < 2 else second).apply(split, gradients, 0.01)
    assert all(torch.equal(through[name], split[name]) for name in through)


def test_a_loaded_state_is_a_copy() -> None:
    parameters = _parameters()
    first, second = StageOptimizer(OptimizerSpec()), StageOptimizer(OptimizerSpec())
    first.apply(parameters, next(_gradients(1)), 0.01)
    second.load_state(first.state(), parameters)
    before = second.state()["dense.weight"]["exp_avg"].clone()
    first.apply(parameters, next(_gradients(1)), 0.01)
    assert torch.equal(second.state()["dense.weight"]["exp_avg"], before)


def test_a_state_of_another_stage_another_shape_or_another_optimizer_is_refused() -> None:
    parameters = _parameters()
    optimizer = StageOptimizer(OptimizerSpec())
    optimizer.apply(parameters, next(_gradients(1)), 0.01)
    state = optimizer.state()
    with pytest.raises(CheckpointError, match=r"dense\.weight, which this stage does not train"):
        optimizer.load_state(state, {"other": parameters["unused"]})
    with pytest.raises(CheckpointError, match=r"dense.weight has .*\(5, 3\)"):
        optimizer.load_state(state, {**parameters, "dense.weight": nn.Parameter(torch.zeros(3, 5))})
    with pytest.raises(CheckpointError, match="sgd needs"):
        StageOptimizer(OptimizerSpec(name="sgd", momentum=0.5)).load_state(state, parameters)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_parameters_know_that_they_were_changed(spec: OptimizerSpec) -> None:
    parameters = _parameters()
    before = {name: parameter._version for name, parameter in parameters.items()}
    gradients = next(_gradients(1))
    StageOptimizer(spec).apply(parameters, gradients, 0.1)
    assert {name for name, one in parameters.items() if one._version > before[name]} == set(gradients)
