"""Selected tokens alone give the gradients that all tokens give, by a network written a second time in plain torch.

The reference is the whole transformers model in float64 on all tokens: a hook on its last block adds what the equations
of METHODS 2.4 say, and the loss is the model's usual one over the whole batch.
"""

import math

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from coterie.jobs.side_spec import SideSpec
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.side_network import PREFIX

SIDE = SideSpec(rank=4, temperature=0.2)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over what has a label, of all tokens or of the selected ones, in the type of the logits."""
    if labels.is_floating_point():
        return (logits.reshape(-1) - labels)[labels.isfinite()].square().sum()
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def plain_side_network(layers: list[Tensor], side: SideSpec, weights: dict[str, Tensor]) -> Tensor:
    """[B, T, D] of the layers' [B, T, D], by the equations."""
    state = torch.zeros(())
    for number, hidden in enumerate(layers, start=1):
        if number < side.first_layer:
            continue
        mixed = hidden
        if number > side.first_layer:
            gate = 1 / (1 + torch.exp(-weights[f"gates.{number}"] / side.temperature))
            mixed = gate * state + (1 - gate) * hidden
        centred = mixed - mixed.mean(-1, keepdim=True)
        normal = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        normal = normal * weights[f"norms.{number}.weight"] + weights[f"norms.{number}.bias"]
        narrow = normal @ weights[f"down.{number}.weight"].T
        active = 0.5 * narrow * (1 + torch.erf(narrow / math.sqrt(2)))
        state = mixed + active @ weights[f"up.{number}.weight"].T
    return weights["output_gate"] / side.temperature * state


def reference(case, side: SideSpec, weights: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model with the side network in it, on all tokens, in float64."""
    own = {name: weights[PREFIX + name].double().requires_grad_() for name in network_names(weights)}
    seen: list[Tensor] = []
    blocks = list(case.plain.get_submodule(case.anatomy.blocks_name).children())

    def climb(block, _inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        seen.append(hidden)
        if block is not blocks[-1]:
            return output
        risen = hidden + plain_side_network(seen, side, own)
        return (risen, *output[1:]) if isinstance(output, tuple) else risen

    handles = [block.register_forward_hook(climb) for block in blocks]
    model = case.plain.double()
    trained = {name: p for name, p in model.named_parameters() if name in case.anatomy.trainable_names}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    labels = case.labels.double() if case.labels.is_floating_point() else case.labels
    loss = loss_of(model(**case.inputs).logits, labels)
    wanted = {PREFIX + name: tensor for name, tensor in own.items()} | trained
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    for handle in handles:
        handle.remove()
    model.float()
    return loss.item(), dict(zip(wanted, gradients, strict=True))


def network_names(weights: dict[str, Tensor]) -> list[str]:
    return [name.removeprefix(PREFIX) for name in weights if name.startswith(PREFIX)]


def in_float64(case, side: SideSpec) -> ActivationBatch:
    """As `case.taps`, of the plain model in float64."""
    seen: list[Tensor] = []
    selection = TokenSelector(case.spec, side).select(case.inputs, case.labels)

    def tap(_block, _inputs, output):
        seen.append(selection.gather(output[0] if isinstance(output, tuple) else output))

    blocks = case.plain.get_submodule(case.anatomy.blocks_name).children()
    handles = [block.register_forward_hook(tap) for block in blocks]
    with torch.no_grad():
        case.plain.double()(**case.inputs)
    case.plain.float()
    for handle in handles:
        handle.remove()
    labels = selection.loss_labels(case.labels)
    return ActivationBatch(
        samples=torch.arange(len(case.labels)),
        counts=selection.counts,
        layers=(1, 2, 3),
        taps=torch.stack(seen, dim=1),
        labels=labels.double() if labels.is_floating_point() else labels,
        loss_index=selection.loss_index,
    )


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference < relative, f"{name} differs by {difference:.1e}"


def test_gradients_of_selected_tokens_are_those_of_the_whole_model_on_all_tokens(case):
    assert_gradients_of_the_whole_model(case, SIDE)


@pytest.mark.parametrize("name", ["bert tags", "llama labels", "gpt2 text"])
def test_gradients_are_the_same_where_all_tokens_are_sent(side_case, name):
    assert_gradients_of_the_whole_model(side_case(name), msgspec.structs.replace(SIDE, selects_tokens=False))


def assert_gradients_of_the_whole_model(case, side: SideSpec) -> None:
    model = case.side_model(SIDE, opened=True)
    weights = {name: parameter.detach().clone() for name, parameter in model.parameters().items()}
    loss, wanted = reference(case, SIDE, weights)
    batch = in_float64(case, side)
    model.network.double()
    model.output.module.double()
    ours = loss_of(model.logits(batch), batch.labels)
    parameters = model.parameters()
    found = dict(zip(parameters, torch.autograd.grad(ours, list(parameters.values())), strict=True))
    assert ours.item() == pytest.approx(loss, rel=1e-9)
    assert_close(found, wanted, 1e-9)


def test_a_ladder_that_starts_higher_follows_the_same_equations(side_case):
    case = side_case("bert labels")
    side = SideSpec(rank=4, first_layer=2)
    model = case.side_model(side, opened=True)
    weights = {name: parameter.detach().clone() for name, parameter in model.parameters().items()}
    assert sorted(network_names(weights)) == sorted(
        [
            "gates.3",
            "output_gate",
            *(f"{part}.{layer}.weight" for part in ("norms", "down", "up") for layer in (2, 3)),
            "norms.2.bias",
            "norms.3.bias",
        ]
    )
    loss, _ = reference(case, side, weights)
    batch = case.taps(side)
    assert loss_of(model.logits(batch), batch.labels).item() == pytest.approx(loss, rel=1e-5)
