import json

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, BertConfig

from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import describe
from coterie.pipeline.micro_batch import MicroBatch, split_batch
from coterie.pipeline.single_device import SingleDeviceTrainer

OPTIMIZER = OptimizerSpec(learning_rate=0.01, weight_decay=0.0, max_grad_norm=0.5, lr_schedule="constant")


class TokenLoss:
    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def predictions(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


def _model(spec: ModelSpec, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    settings = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return AutoModelForTokenClassification.from_config(
        BertConfig.from_dict({**json.loads(spec.config_json), **settings})
    ).train()


def _labels() -> Tensor:
    return torch.tensor([[0, 1, 2, -100], [-100] * 4, [1, 1, -100, -100]])


def _micro_batches(step: int, count: int) -> tuple[MicroBatch, ...]:
    ids = {"input_ids": torch.arange(12).view(3, 4) + step}
    return split_batch(ids, _labels(), micro_batches=count, step=step, samples_seen=3 * step)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_micro_batches_of_any_number_train_like_the_models_own_mean_loss_on_the_whole_batch(
    tiny_spec: ModelSpec, count: int
) -> None:
    ours, plain = _model(tiny_spec, 0.0), _model(tiny_spec, 0.0)
    trainer = SingleDeviceTrainer(ours, describe(tiny_spec), OPTIMIZER, TokenLoss(), seed=0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(4):
        result = trainer.run_step(_micro_batches(step, count))
        loss = plain(input_ids=torch.arange(12).view(3, 4) + step, labels=_labels()).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss_tokens == 5
        assert result.loss_sum / result.loss_tokens == pytest.approx(loss.item(), rel=1e-4)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-3)


def test_dropout_differs_from_step_to_step_and_repeats_with_the_seed(tiny_spec: ModelSpec) -> None:
    frozen = OptimizerSpec(learning_rate=0.0)

    def losses(seed: int) -> list[float]:
        trainer = SingleDeviceTrainer(_model(tiny_spec, 0.5), describe(tiny_spec), frozen, TokenLoss(), seed=seed)
        batch = _micro_batches(0, 1)[0]
        return [trainer.run_step([msgspec.structs.replace(batch, step=step)]).loss_sum for step in range(3)]

    assert len(set(losses(1))) == 3
    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_a_step_without_labels_has_loss_zero_and_moves_nothing(tiny_spec: ModelSpec) -> None:
    model = _model(tiny_spec, 0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = SingleDeviceTrainer(model, describe(tiny_spec), OPTIMIZER, TokenLoss(), seed=0)
    ids = {"input_ids": torch.arange(12).view(3, 4)}
    masked = split_batch(ids, torch.full((3, 4), -100), micro_batches=2, step=0, samples_seen=0)
    result = trainer.run_step(masked)
    assert (result.loss_sum, result.loss_tokens, result.micro_batch_loss_sums) == (0.0, 0, (0.0, 0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
