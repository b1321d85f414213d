"""The plain reference: a whole Hugging Face model on one device, in an ordinary PyTorch loop.

Nothing here is cut, scheduled, stashed or sent, and the optimizer is torch's own: what a pipeline must equal is
computed without the pipeline. Only the rule that ties randomness to (seed, step, micro-batch, unit) is shared.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import Anatomy, RandomKey, seed_by_key
from coterie.pipeline.executor_settings import OutputTask
from coterie.pipeline.micro_batch import MicroBatch


class SingleDeviceStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step: the mean loss is `loss_sum / loss_tokens`; without loss tokens nothing was updated.

    `micro_batch_loss_sums` has one entry per micro-batch, 0 where it has no loss tokens.
    """

    step: int
    loss_sum: float
    loss_tokens: int
    micro_batch_loss_sums: tuple[float, ...]
    grad_norm: float
    learning_rate: float


class SingleDeviceTrainer:
    """Trains an uncut model: accumulate over micro-batches, clip by the global norm, step."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, spec: OptimizerSpec, task: OutputTask, *, seed: int) -> None:
        """Take a model whose parameters to train have `requires_grad`; it is trained in place."""
        self._model = model.train()
        self._spec = spec
        self._task = task
        self._seed = seed
        self._set_key = seed_by_key(model, anatomy)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = _optimizer(spec, self._parameters)

    def run_step(self, micro_batches: Sequence[MicroBatch]) -> SingleDeviceStep:
        """One optimizer step over all micro-batches of a batch."""
        first = micro_batches[0]
        tokens = first.step_loss_tokens
        losses = [self._accumulate(batch) if batch.micro_batch_loss_tokens else 0.0 for batch in micro_batches]
        norm, rate = 0.0, self._spec.learning_rate_at(first.samples_seen)
        if tokens:
            if self._spec.max_grad_norm > 0:
                norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._spec.max_grad_norm))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return SingleDeviceStep(
            step=first.step,
            loss_sum=sum(losses),
            loss_tokens=tokens,
            micro_batch_loss_sums=tuple(losses),
            grad_norm=norm,
            learning_rate=rate,
        )

    def _accumulate(self, batch: MicroBatch) -> float:
        assert batch.labels is not None
        self._set_key(RandomKey(self._seed, batch.step, batch.micro_batch))
        logits = self._model(**batch.inputs).logits
        loss = self._task.loss_sum(logits, batch.labels)
        torch.autograd.backward(loss / batch.step_loss_tokens)
        return float(loss.detach())


def _optimizer(spec: OptimizerSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon, fused=True)
    return torch.optim.SGD(groups, lr=spec.learning_rate, momentum=spec.momentum)
