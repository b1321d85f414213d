"""The server's training: one optimizer step over some rows' activations, whether they came just now or from a cache."""

import math
from collections.abc import Iterator, Mapping

import msgspec
import torch
from torch import Tensor

from coterie.errors import CheckpointError, NonFiniteLossError
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.pipeline.executor_settings import OutputTask
from coterie.pipeline.gradients import clip_in_place, squared_norm
from coterie.pipeline.optimizer import ParameterState, StageOptimizer
from coterie.planner.side_memory import piece_tokens
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.additive import difference_loss_sum
from coterie.sidetuning.side_model import SideModel

_PARAMETERS, _OPTIMIZER = "parameters/", "optimizer/"


class SideStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step: the mean loss is `loss_sum / loss_tokens`; without loss tokens nothing was updated."""

    loss_sum: float
    loss_tokens: int
    grad_norm: float
    learning_rate: float


class SideTrainer:
    """Trains a side model in place.

    The same batches in the same order give the same bits, live or replayed. A batch that is too large for memory is
    worked on in pieces of tokens, by a rule that depends on shapes alone.

    Attributes:
        model: What is trained.
        steps: Optimizer steps so far, those without loss tokens counted.
    """

    def __init__(self, model: SideModel, task: OutputTask, optimizer: OptimizerSpec) -> None:
        self.model = model
        self.steps = 0
        self._task = task
        self._spec = optimizer
        self._optimizer = StageOptimizer(optimizer)
        self._piece_tokens = piece_tokens(len(model.network.layers), model.network.width, model.output_width)

    def step(self, batch: ActivationBatch, samples_seen: int) -> SideStep:
        """One optimizer step over the rows of a batch, which has labels, or in additive mode differences.

        Args:
            batch: All rows of the step.
            samples_seen: Rows of the run before these; the learning rate is a function of it.

        Raises:
            NonFiniteLossError: The loss or the gradient norm is NaN or infinite; nothing has been changed.
        """
        assert batch.labels is not None, "the server trains on labels or differences"
        rate = self._spec.learning_rate_at(samples_seen)
        if batch.loss_tokens == 0:
            self.steps += 1
            return SideStep(loss_sum=0.0, loss_tokens=0, grad_norm=0.0, learning_rate=rate)
        parameters = self.model.parameters()
        try:
            loss_sum = self._accumulate(batch)
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            squared = sum(squared_norm(gradient) for gradient in gradients.values())
            if not math.isfinite(loss_sum) or not math.isfinite(squared):
                raise NonFiniteLossError(
                    f"step {self.steps + 1} of the side network has the loss {loss_sum / batch.loss_tokens} and the "
                    f"gradient norm {math.sqrt(abs(squared))}",
                    hint="lower the learning rate or clip gradients (max_grad_norm)",
                    step=self.steps,
                )
            norm = clip_in_place(gradients.values(), squared, self._spec.max_grad_norm)
            self._optimizer.apply(parameters, gradients, rate)
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        self.steps += 1
        return SideStep(loss_sum=loss_sum, loss_tokens=batch.loss_tokens, grad_norm=norm, learning_rate=rate)

    def state(self) -> dict[str, Tensor]:
        """All that a later trainer needs to go on: parameters, the optimizer's state, the count of steps; copies."""
        named = {_PARAMETERS + name: p.detach() for name, p in self.model.parameters().items()}
        for name, tensors in self._optimizer.state().items():
            named |= {f"{_OPTIMIZER}{name}/{key}": tensor for key, tensor in tensors.items()}
        return {"steps": torch.tensor(self.steps)} | {name: t.to("cpu", copy=True) for name, t in named.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, in another process perhaps.

        Raises:
            CheckpointError: It belongs to another side network, task layer or optimizer.
        """
        parameters = self.model.parameters()
        saved = {n.removeprefix(_PARAMETERS): t for n, t in state.items() if n.startswith(_PARAMETERS)}
        wrong = [n for n in saved.keys() | parameters.keys() if _shape(saved, n) != _shape(parameters, n)]
        if wrong or "steps" not in state:
            name = min(wrong, default="steps")
            raise CheckpointError(
                f"the saved side network has {name} of shape {_shape(saved, name)}, and {_shape(parameters, name)} is "
                "wanted",
                hint="resume with the model, rank and first layer that it was trained with",
            )
        moments: dict[str, ParameterState] = {}
        for key, tensor in state.items():
            if key.startswith(_OPTIMIZER):
                name, _, kind = key.removeprefix(_OPTIMIZER).rpartition("/")
                moments.setdefault(name, {})[kind] = tensor
        self._optimizer.load_state(moments, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])
        self.steps = int(state["steps"])

    def _accumulate(self, batch: ActivationBatch) -> float:
        """Add up the gradients of the mean loss; the sum of the loss."""
        total = 0.0
        for piece in _pieces(batch, self._piece_tokens):
            labels = piece.labels
            assert labels is not None
            labels = labels.to(self.model.output.device)
            if self.model.side.mode == "additive":
                loss = difference_loss_sum(self.model.additions(piece), labels)
            else:
                loss = self._task.loss_sum(self.model.logits(piece), labels)
            total += loss.item()
            torch.autograd.backward(loss / batch.loss_tokens)
        return total


def _pieces(batch: ActivationBatch, tokens: int) -> Iterator[ActivationBatch]:
    """The batch, or parts of it with at most `tokens` tokens each, which need not end where rows do."""
    if batch.tokens <= tokens:
        yield batch
        return
    assert batch.labels is not None
    for start in range(0, batch.tokens, tokens):
        stop = min(start + tokens, batch.tokens)
        low, high, index = start, stop, None
        if batch.loss_index is not None:
            low, high = torch.searchsorted(batch.loss_index, torch.tensor([start, stop])).tolist()
            index = batch.loss_index[low:high] - start
        if low < high:
            yield ActivationBatch(
                samples=batch.samples[:1],
                counts=torch.tensor([stop - start]),
                layers=batch.layers,
                taps=batch.taps[start:stop],
                labels=batch.labels[low:high],
                loss_index=index,
            )


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
