from collections.abc import Callable

import torch
from torch import Tensor

from coterie.models import StageModule
from coterie.pipeline.weight_stash import WeightStash
from coterie.schedules.actions import Action

NAME = "bert.encoder.layer.0.output.dense.bias"
StageOf = Callable[[int, int], StageModule]


def _actions(text: str) -> tuple[Action, ...]:
    """`F0 B0 U1` ...: kind and weight version."""
    return tuple(Action(kind=word[0], step=0, micro_batch=0, weight_version=int(word[1:])) for word in text.split())


def _add_one(parameters: dict[str, torch.nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(1.0)


def _installed(stage: StageModule) -> Tensor:
    return stage.trainable()[NAME].detach().clone()


def test_without_older_users_an_update_is_in_place_and_nothing_is_copied(stage_of: StageOf) -> None:
    stage = stage_of(1, 3)
    before = {name: parameter.data_ptr() for name, parameter in stage.trainable().items()}
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 B0 U1 F1 B1 U2"))
    for index, version in ((2, 1), (5, 2)):
        _add_one(stash.next_version(version, index))
        assert stash.live_versions == 1
        assert stash.stashed_bytes == 0
        stash.release(index)
    stash.install(2)
    assert {name: parameter.data_ptr() for name, parameter in stage.trainable().items()} == before


def test_an_old_version_stays_as_it_was_until_its_last_use(stage_of: StageOf) -> None:
    stage = stage_of(1, 3)
    own_bytes = sum(parameter.nbytes for parameter in stage.trainable().values())
    first = _installed(stage)
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 F0 B0 U1 F1 B0 U2 B1"))
    _add_one(stash.next_version(1, 3))
    stash.release(3)
    stash.install(1)
    assert torch.equal(_installed(stage), first + 1)
    stash.install(0)
    assert torch.equal(_installed(stage), first)
    assert (stash.live_versions, stash.stashed_bytes) == (2, own_bytes)
    stash.release(5)
    assert (stash.live_versions, stash.stashed_bytes) == (1, 0)
    assert torch.equal(_installed(stage), first + 1)


def test_backward_through_an_old_version_sees_old_weights_after_an_update(stage_of: StageOf) -> None:
    stage = stage_of(1, 3)
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 F0 B0 U1 B0"))
    weight = stage.trainable()["bert.encoder.layer.0.output.dense.weight"]
    inputs = torch.ones(8, 12, requires_grad=True)
    product = (inputs * weight).sum()
    expected = weight.detach().clone()
    _add_one(stash.next_version(1, 3))
    product.backward()
    assert torch.equal(inputs.grad, expected)


def test_gradients_follow_from_version_to_version_until_they_are_taken(stage_of: StageOf) -> None:
    stage = stage_of(1, 3)
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 F0 B0 U1 F1 B0 B1 U2"))
    stash.next_version(1, 3)
    stash.install(0)
    stage.trainable()[NAME].grad = torch.full((8,), 2.0)
    stash.release(5)  # version 0 goes, what was collected on it stays
    assert stash.gradients()[NAME].tolist() == [2.0] * 8
    stash.collect_on(1)
    stash.install(1)
    stage.trainable()[NAME].grad += 1.0
    assert {name: gradient.tolist() for name, gradient in stash.gradients().items()} == {NAME: [3.0] * 8}
    stash.drop_gradients()
    assert stash.gradients() == {}


def test_a_skipped_update_makes_a_version_without_a_copy(stage_of: StageOf) -> None:
    stage = stage_of(1, 3)
    first = _installed(stage)
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 F0 B0 U1 B0 U2"))
    stash.repeat_version(1)
    stash.release(3)
    assert stash.live_versions == 1
    stash.install(1)
    assert torch.equal(_installed(stage), first)


def test_weights_shared_by_a_skipped_update_are_kept_for_the_users_of_both_numbers(stage_of: StageOf) -> None:
    stage = stage_of(1, 3)
    first = _installed(stage)
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 F0 B0 U1 F1 B0 U2 B1"))
    stash.repeat_version(1)
    _add_one(stash.next_version(2, 6))
    stash.release(6)
    stash.install(1)
    assert torch.equal(_installed(stage), first)
    stash.release(7)
    stash.install(2)
    assert torch.equal(_installed(stage), first + 1)


def test_abandoning_a_segment_keeps_the_newest_weights_and_no_gradient(stage_of: StageOf) -> None:
    stage = stage_of(1, 3)
    first = _installed(stage)
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 F0 B0 U1 B0"))
    _add_one(stash.next_version(1, 3))
    stash.install(0)
    stage.trainable()[NAME].grad = torch.ones(8)
    stash.abandon()
    assert torch.equal(_installed(stage), first + 1)
    assert stash.gradients() == {}
    assert stash.live_versions == 1


def test_a_stage_without_trained_parameters_has_one_empty_version(stage_of: StageOf) -> None:
    stage = stage_of(0, 1)
    for parameter in stage.parameters().values():
        parameter.requires_grad_(False)
    stash = WeightStash(stage)
    stash.open_segment(_actions("F0 F0 B0 U1 B0 U2"))
    assert stash.next_version(1, 3) == {}
    stash.release(3)
    stash.install(0)
    assert stash.stashed_bytes == 0
