"""The seam between a stage and everything outside it: batches, links to its neighbours, sums over stages, reports."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from coterie.pipeline.micro_batch import MicroBatch
from coterie.pipeline.reports import MicroBatchReport, StepReport


class StagePorts(Protocol):
    """Blocking calls from the compute thread of one stage. Steps are steps of the run.

    Every call may raise a `CoterieError` (the run was stopped, a neighbour was lost); the executor lets it through.
    Tensors that are handed in are detached and on the CPU, and the executor does not touch them again.
    """

    def take_batch(self, step: int, micro_batch: int) -> MicroBatch:
        """Wait for a micro-batch. Asked once per forward."""
        ...

    def take_hidden(self, step: int, micro_batch: int) -> Tensor:
        """Wait for the previous stage's output, [B, T, D]."""
        ...

    def put_hidden(self, step: int, micro_batch: int, hidden: Tensor) -> None:
        """Send this stage's output, [B, T, D], to the next stage; may wait for room in its queue."""
        ...

    def take_gradient(self, step: int, micro_batch: int) -> Tensor:
        """Wait for the gradient of this stage's output, [B, T, D]."""
        ...

    def put_gradient(self, step: int, micro_batch: int, gradient: Tensor) -> None:
        """Send the gradient of what `take_hidden` gave, [B, T, D], to the previous stage. Must not wait for room."""
        ...

    def take_done(self, step: int, micro_batch: int) -> None:
        """Wait until the next stage is done with a micro-batch, where no gradient comes back: how far ahead to run."""
        ...

    def put_done(self, step: int, micro_batch: int) -> None:
        """Tell the previous stage so, which trains nothing and gets no gradient. Must not wait for room."""
        ...

    def put_predictions(self, step: int, micro_batch: int, predictions: Tensor) -> None:
        """Hand out what the task reads from the logits, [B, ...]; last stage, forward-only schedule."""
        ...

    def total_squared_norm(self, step: int, unit_squared_norms: Mapping[int, float]) -> float:
        """The sum over all units of all stages, added in unit order in float64, so that it is the same for every cut.

        Every stage calls it once per step that updates, those without trained units too.
        """
        ...

    def exchange_tied(self, step: int, gradient: Tensor) -> Tensor:
        """The embedding's gradient plus the output layer's, added in that order on both ends: equal bits."""
        ...

    def micro_batch_done(self, report: MicroBatchReport) -> None:
        """Record a loss; last stage only."""
        ...

    def step_done(self, report: StepReport) -> None:
        """Record that this stage has finished a step."""
        ...
