"""Ports that connect the stages of one pipeline inside one process, each stage in a thread of its own."""

import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from coterie.errors import WorkerLostError
from coterie.pipeline.gradients import sum_in_unit_order
from coterie.pipeline.micro_batch import MicroBatch
from coterie.pipeline.reports import MicroBatchReport, StepReport

BatchSource = Callable[[int, int], MicroBatch]
"""The micro-batch of (step, micro-batch); called from every stage's thread, must give every stage the same."""

_Key = tuple[str, int, int, int]


class MemoryPipeline:
    """What the stages of one process share: mail boxes between neighbours, sums over stages, collected reports.

    Hidden states wait in bounded boxes. Gradients do not: their number is bounded by the micro-batches in flight, and
    a later stage that never waits for room cannot deadlock with an earlier one that does.

    Attributes:
        losses: Reports of the last stage, in the order in which they came.
        steps: Step reports of each stage.
        predictions: What a forward-only schedule's last stage read from the logits, by (step, micro-batch).
    """

    def __init__(self, stages: int, batches: BatchSource, *, hidden_capacity: int = 8) -> None:
        self.losses: list[MicroBatchReport] = []
        self.steps: list[list[StepReport]] = [[] for _ in range(stages)]
        self.predictions: dict[tuple[int, int], Tensor] = {}
        self._stages = stages
        self._batches = batches
        self._capacity = hidden_capacity
        self._changed = threading.Condition()
        self._boxes: dict[_Key, Tensor] = {}
        self._done: set[_Key] = set()
        self._waiting_hidden = [0] * (stages + 1)
        self._norms: dict[int, dict[int, dict[int, float]]] = {}
        self._sums: dict[int, tuple[float, int]] = {}
        self._failure: BaseException | None = None

    @property
    def last_stage(self) -> int:
        """Index of the stage with the output layer."""
        return self._stages - 1

    def ports(self, stage: int) -> "MemoryPorts":
        """The ports of one stage."""
        return MemoryPorts(self, stage)

    def batch(self, step: int, micro_batch: int) -> MicroBatch:
        """What the source gives."""
        return self._batches(step, micro_batch)

    def abort(self, failure: BaseException) -> None:
        """Wake every waiting stage with a `WorkerLostError`; the first failure counts."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def put(self, key: _Key, tensor: Tensor) -> None:
        """Lay a tensor into the box of stage `key[1]`."""
        kind, target = key[0], key[1]
        with self._changed:
            if kind == "hidden":
                self._wait_for(lambda: self._waiting_hidden[target] < self._capacity)
                self._waiting_hidden[target] += 1
            assert key not in self._boxes
            self._boxes[key] = tensor
            self._changed.notify_all()

    def take(self, key: _Key) -> Tensor:
        """Wait for the tensor of `key` and remove it from its box."""
        with self._changed:
            self._wait_for(lambda: key in self._boxes)
            if key[0] == "hidden":
                self._waiting_hidden[key[1]] -= 1
                self._changed.notify_all()
            return self._boxes.pop(key)

    def mark_done(self, key: _Key) -> None:
        """Let `wait_for_done` of the same key pass."""
        with self._changed:
            self._done.add(key)
            self._changed.notify_all()

    def wait_for_done(self, key: _Key) -> None:
        """Wait for `mark_done`."""
        with self._changed:
            self._wait_for(lambda: key in self._done)
            self._done.discard(key)

    def sum_norms(self, stage: int, step: int, own: Mapping[int, float]) -> float:
        """Wait until every stage has given its units' values of `step`; their sum in unit order."""
        with self._changed:
            given = self._norms.setdefault(step, {})
            given[stage] = dict(own)
            if len(given) == self._stages:
                del self._norms[step]
                everything = {unit: value for part in given.values() for unit, value in part.items()}
                self._sums[step] = (sum_in_unit_order(everything), self._stages)
                self._changed.notify_all()
            self._wait_for(lambda: step in self._sums)
            total, readers = self._sums.pop(step)
            if readers > 1:
                self._sums[step] = (total, readers - 1)
            return total

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or condition())
        if self._failure is not None:
            raise WorkerLostError(f"another stage of this process stopped: {self._failure}") from self._failure


class MemoryPorts:
    """`StagePorts` of one stage of a `MemoryPipeline`; tensors are handed over without a copy."""

    def __init__(self, pipeline: MemoryPipeline, stage: int) -> None:
        self._pipeline = pipeline
        self._stage = stage

    def take_batch(self, step: int, micro_batch: int) -> MicroBatch:
        """Ask the source."""
        return self._pipeline.batch(step, micro_batch)

    def take_hidden(self, step: int, micro_batch: int) -> Tensor:
        """Wait for [B, T, D] from the previous stage."""
        return self._pipeline.take(("hidden", self._stage, step, micro_batch))

    def put_hidden(self, step: int, micro_batch: int, hidden: Tensor) -> None:
        """Hand [B, T, D] to the next stage; waits while its box is full."""
        self._pipeline.put(("hidden", self._stage + 1, step, micro_batch), hidden)

    def take_gradient(self, step: int, micro_batch: int) -> Tensor:
        """Wait for [B, T, D] from the next stage."""
        return self._pipeline.take(("gradient", self._stage, step, micro_batch))

    def put_gradient(self, step: int, micro_batch: int, gradient: Tensor) -> None:
        """Hand [B, T, D] to the previous stage."""
        self._pipeline.put(("gradient", self._stage - 1, step, micro_batch), gradient)

    def take_done(self, step: int, micro_batch: int) -> None:
        """Wait for the next stage's word."""
        self._pipeline.wait_for_done(("done", self._stage, step, micro_batch))

    def put_done(self, step: int, micro_batch: int) -> None:
        """Leave word for the previous stage."""
        self._pipeline.mark_done(("done", self._stage - 1, step, micro_batch))

    def put_predictions(self, step: int, micro_batch: int, predictions: Tensor) -> None:
        """Keep them in the pipeline's `predictions`."""
        self._pipeline.predictions[step, micro_batch] = predictions

    def total_squared_norm(self, step: int, unit_squared_norms: Mapping[int, float]) -> float:
        """Wait for all stages; the sum in unit order."""
        return self._pipeline.sum_norms(self._stage, step, unit_squared_norms)

    def exchange_tied(self, step: int, gradient: Tensor) -> Tensor:
        """Wait for the other end's gradient; the embedding's plus the output layer's."""
        self._pipeline.put(("tied from", self._stage, step, 0), gradient)
        if self._stage == 0:
            return gradient + self._pipeline.take(("tied from", self._pipeline.last_stage, step, 0))
        return self._pipeline.take(("tied from", 0, step, 0)) + gradient

    def micro_batch_done(self, report: MicroBatchReport) -> None:
        """Append to the pipeline's `losses`."""
        self._pipeline.losses.append(report)

    def step_done(self, report: StepReport) -> None:
        """Append to the pipeline's `steps` of this stage."""
        self._pipeline.steps[self._stage].append(report)


def run_in_threads(pipeline: MemoryPipeline, run_stage: Callable[[int], None], stages: Sequence[int]) -> None:
    """Run every stage in a thread of its own, wait for all, and raise the error that stopped the first of them."""
    failures: list[BaseException] = []

    def run(stage: int) -> None:
        try:
            run_stage(stage)
        except BaseException as failure:  # carried to the caller's thread and raised there
            failures.append(failure)
            pipeline.abort(failure)

    threads = [threading.Thread(target=run, args=(stage,), name=f"stage {stage}") for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
