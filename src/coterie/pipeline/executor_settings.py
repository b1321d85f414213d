"""What an executor is told beside its stage: how to run, and what the last stage does with the logits."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from coterie.pipeline.optimizer import ParameterState


class OutputTask(Protocol):
    """The part of a task that the last stage needs."""

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Float32 scalar: the loss of every token whose label is not -100, added up."""
        ...

    def predictions(self, logits: Tensor) -> Tensor:
        """What the task reads from the logits, [B, ...]."""
        ...


class ExecutorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage runs.

    Attributes:
        seed: The run's seed; with step, micro-batch and unit it fixes all randomness.
        sends_gradient: Some unit before this stage is trained, so the previous stage waits for gradients. If not, that
            stage runs forward only, and is told when a micro-batch is done, lest it run ahead without end.
        recompute: Keep block inputs only and run the blocks' forwards again in backward.
        name: What messages call this stage, with its device.
    """

    seed: int
    sends_gradient: bool
    recompute: bool = False
    name: str = "this stage"


class BackendUse(Protocol):
    """The compute backends that share a stage's layers, as its executor sees them."""

    def cpu_s(self) -> float:
        """CPU seconds so far that the compute thread waited for them."""
        ...

    def since_last(self) -> tuple[dict[str, float], dict[str, str]]:
        """Busy seconds of each since this was asked last, and those that failed meanwhile, with the reason."""
        ...

    def step_ended(self, *, is_idle: bool) -> None:
        """An optimizer step is over; `is_idle`: no micro-batch is between its forward and its backward."""
        ...


class StateTaker(Protocol):
    """Copies the trained state at optimizer steps, as the executor sees it. All calls come from its thread."""

    def before_update(self) -> None:
        """The trained parameters, or the optimizer's state, are about to change; may wait until they may."""
        ...

    def after_step(
        self, steps_done: int, parameters: Mapping[str, Tensor], state: Mapping[str, ParameterState]
    ) -> None:
        """All updates of a step are done.

        Args:
            steps_done: Optimizer steps of the run so far.
            parameters: The newest version of the trained parameters, by name.
            state: The optimizer's, by parameter name. All tensors are the live ones until `before_update`.
        """
        ...


def trains_below(trainable: Sequence[Sequence[str]], first_unit: int) -> bool:
    """Whether a stage that starts at `first_unit` must send gradients down.

    Args:
        trainable: Names of trained parameters per unit, as in `Anatomy.trainable`.
        first_unit: The stage's first unit.
    """
    return any(trainable[:first_unit])
