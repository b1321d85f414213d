"""Additive mode: what the server learns from differences, and where it equals learning from labels."""

import pytest
import torch

from coterie.errors import RecipeError
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.jobs.side_spec import SideSpec
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.additive import added, check_additive, difference_loss_sum, prediction_differences
from coterie.sidetuning.trainer import SideTrainer
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.regression import Regression
from coterie.tasks.sequence_classification import SequenceClassification

DIRECT, ADDITIVE = SideSpec(rank=4), SideSpec(rank=4, mode="additive")
ADAMW = OptimizerSpec(learning_rate=1e-2, lr_schedule="constant")


def with_differences(case) -> ActivationBatch:
    """The case's batch with differences to the backbone's own predictions in the labels' place."""
    batch = case.taps(ADDITIVE)
    logits = case.side_model(ADDITIVE).backbone_logits(batch)
    return ActivationBatch(
        samples=batch.samples,
        counts=batch.counts,
        layers=batch.layers,
        taps=batch.taps,
        labels=prediction_differences(logits, batch.labels),
        loss_index=batch.loss_index,
    )


@pytest.mark.parametrize("name", ["bert scores", "opt-350m shape scores"])
def test_a_regression_learns_the_same_from_differences_as_from_scores(side_case, name):
    case = side_case(name)
    direct = SideTrainer(case.side_model(DIRECT), Regression(), ADAMW)
    additive = SideTrainer(case.side_model(ADDITIVE), Regression(), ADAMW)
    from_scores, from_differences = case.taps(DIRECT), with_differences(case)
    assert from_differences.labels.shape == (3,)
    losses = []
    for _ in range(12):
        losses.append(direct.step(from_scores, 0).loss_sum)
        assert additive.step(from_differences, 0).loss_sum == pytest.approx(losses[-1], rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]
    scores = additive.model.backbone_logits(from_scores)
    with torch.no_grad():
        predicted = added(scores, additive.model.additions(from_scores))
        torch.testing.assert_close(predicted, direct.model.logits(from_scores), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bert labels", "llama labels", "bert tags"])
def test_a_classifications_first_gradient_is_that_of_the_cross_entropy_and_later_ones_are_not(side_case, name):
    case = side_case(name)
    from_labels, from_differences = case.taps(DIRECT), with_differences(case)
    task = SequenceClassification()

    def gradients(*, opened):
        direct, additive = case.side_model(DIRECT, opened=opened), case.side_model(ADDITIVE, opened=opened)
        task.loss_sum(direct.logits(from_labels), from_labels.labels).backward()
        difference_loss_sum(additive.additions(from_differences), from_differences.labels).backward()
        return [
            torch.cat([parameter.grad.flatten() for parameter in model.parameters().values()])
            for model in (direct, additive)
        ]

    wanted, found = gradients(opened=False)
    assert wanted.norm() > 0
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    wanted, found = gradients(opened=True)
    assert (found - wanted).norm() > 1e-3 * wanted.norm()


def test_additions_are_zero_before_the_first_step_and_learn_the_differences_away(side_case):
    case = side_case("distilbert labels")
    batch = with_differences(case)
    trainer = SideTrainer(case.side_model(ADDITIVE), SequenceClassification(), ADAMW)
    assert not trainer.model.additions(batch).any()
    losses = [trainer.step(batch, 0).loss_sum for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    with torch.no_grad():
        predicted = added(trainer.model.backbone_logits(batch), trainer.model.additions(batch)).argmax(-1)
    assert torch.equal(predicted, case.taps(DIRECT).labels)


def test_the_only_positive_entry_of_a_difference_is_the_label(side_case):
    case = side_case("bert labels")
    differences = with_differences(case).labels
    assert ((differences > 0).sum(-1) == 1).all()
    assert torch.equal(differences.argmax(-1), case.taps(DIRECT).labels)


def test_a_language_model_has_no_additive_mode():
    with pytest.raises(RecipeError, match="every token of the vocabulary"):
        check_additive(CausalLm())
    check_additive(SequenceClassification())
