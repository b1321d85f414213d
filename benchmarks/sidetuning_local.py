"""What side-tuning is compared with: BitFit and LoRA on the device alone, and BitFit with its middle on the server.

BitFit runs once for both of its rows: as three stages, of which the device's are the first and the last. A cut model
computes what the whole one does (tests/numerics/pipeline), so the stages' sum is what one device would do.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from coterie.coordinator.evaluation import score
from coterie.coordinator.feeders import EvaluationFeeder, TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.one_device import as_tensors
from coterie.measure.row_flops import count_row_flops
from coterie.models import PackedWeights, RandomKey, StageModule, build_stage
from coterie.pipeline.executor import StageExecutor
from coterie.pipeline.executor_settings import ExecutorSettings, trains_below
from coterie.pipeline.memory_ports import MemoryPipeline, run_in_threads
from coterie.pipeline.micro_batch import MicroBatch
from coterie.pipeline.optimizer import StageOptimizer
from coterie.profiles.row_flops import ModelFlops
from coterie.schedules import make_schedule
from coterie.transport.limits import wire_bytes
from sidetuning_costs import EpochCost, Point, VariantRun
from sidetuning_settings import SideSetting

SPLIT_CODEC = "fp16"
"""Of hidden states and gradients between device and server; counted, not applied: BitFit's two rows are one run."""

_NO_DROPOUT = RandomKey(seed=0, step=0, micro_batch=0)


class CountingPipeline(MemoryPipeline):
    """A pipeline in memory that counts what would cross links, by the stage that it goes to."""

    def __init__(self, stages: int, feeder: TrainingFeeder) -> None:
        super().__init__(stages, lambda step, index: as_tensors(step, index, feeder.micro_batches(step)[index]))
        self.bytes_to = [0] * stages

    def put(self, key: tuple[str, int, int, int], tensor: Tensor) -> None:
        """See `MemoryPipeline`."""
        if key[0] in {"hidden", "gradient"}:
            self.bytes_to[key[1]] += wire_bytes("float32", tuple(tensor.shape), SPLIT_CODEC)
        super().put(key, tensor)


class LocalTraining:
    """Trains a job's model in stages, one after the other in this process.

    Args:
        job: With the method `bitfit` or `lora`.
        bounds: First unit of each stage, and one past the last.
    """

    def __init__(self, job: Job, bounds: Sequence[int]) -> None:
        self._job = job
        self._feeder = TrainingFeeder(job, 1)
        self.stages = [
            build_stage(job.spec, *units, PackedWeights(job.weights, job.spec)) for units in pairwise(bounds)
        ]
        self._pipeline = CountingPipeline(len(self.stages), self._feeder)
        self._executors = [
            StageExecutor(
                stage,
                StageOptimizer(job.optimizer),
                job.task,
                self._pipeline.ports(index),
                ExecutorSettings(
                    seed=job.spec.seed, sends_gradient=trains_below(job.anatomy.trainable, stage.first_unit)
                ),
            )
            for index, stage in enumerate(self.stages)
        ]

    def run_epoch(self, epoch: int) -> tuple[list[float], list[int]]:
        """Train an epoch; CPU seconds of each stage, and bytes that came to each."""
        steps = self._job.steps_per_epoch
        schedule = make_schedule("flush", stages=len(self.stages), micro_batches=1, steps=steps)
        self._pipeline.bytes_to = [0] * len(self.stages)
        for reports in self._pipeline.steps:
            reports.clear()
        run_in_threads(
            self._pipeline,
            lambda stage: self._executors[stage].run_segment(schedule, stage, epoch * steps),
            range(len(self.stages)),
        )
        cpu_s = [sum(report.cpu_s for report in reports) for reports in self._pipeline.steps]
        return cpu_s, list(self._pipeline.bytes_to)

    def evaluate(self, figure: str) -> Point:
        """Quality on the test rows."""
        return evaluate_stages(self._job, self.stages, figure)


def evaluate_stages(job: Job, stages: Sequence[StageModule], figure: str) -> Point:
    """Quality of stages that stand one behind the other."""
    feeder = EvaluationFeeder(job, "test", 1)
    predicted, loss_sum = {}, 0.0
    for stage in stages:
        stage.eval()
    for step in range(feeder.steps):
        (fed,) = feeder.micro_batches(step)
        batch = as_tensors(step, 0, fed)
        assert batch.labels is not None
        with torch.inference_mode():
            logits = _through(stages, batch)
            loss_sum += float(job.task.loss_sum(logits, batch.labels))
            predicted.update(zip(feeder.rows(step), job.task.predictions(logits).numpy(), strict=True))
    record = score(job, "test", predicted, loss_sum)
    return Point(points=100 * record.metrics[figure], loss=record.loss or 0.0)


def _through(stages: Sequence[StageModule], batch: MicroBatch) -> Tensor:
    hidden = None
    for stage in stages:
        hidden = stage.forward(batch.inputs, hidden, _NO_DROPOUT)
    assert hidden is not None
    return hidden


def padded_lengths(job: Job, epoch: int) -> list[int]:
    """The padded length of each row of an epoch's batches."""
    feeder = TrainingFeeder(job, 1)
    steps = range(epoch * job.steps_per_epoch, (epoch + 1) * job.steps_per_epoch)
    batches = [[job.splits["train"].rows[row].tokens for row in feeder.rows(step).rows] for step in steps]
    return [max(batch) for batch in batches for _ in batch]


def run_local(job: Job, setting: SideSetting, *, seed: int) -> list[VariantRun]:
    """Train the model itself; BitFit gives two runs, of which one has its middle blocks on the server."""
    last = job.anatomy.unit_count - 1
    is_bitfit = job.recipe.train.method == "bitfit"
    bounds = (0, 2, last, last + 1) if is_bitfit else (0, last + 1)
    training = LocalTraining(job, bounds)
    flops = count_row_flops(job.spec)
    curve, alone, split = [], [], []
    for epoch in range(job.recipe.train.epochs):
        cpu_s, received = training.run_epoch(epoch)
        curve.append(training.evaluate(setting.figure))
        lengths = padded_lengths(job, epoch)
        alone.append(EpochCost(device_flops=flops.training(lengths), device_cpu_s=sum(cpu_s)))
        if is_bitfit:
            ends = ModelFlops(units=(*flops.units[: bounds[1]], *flops.units[bounds[2] :]))
            split.append(
                EpochCost(
                    device_flops=ends.training(lengths),
                    device_cpu_s=cpu_s[0] + cpu_s[2],
                    server_cpu_s=cpu_s[1],
                    up_bytes=received[1],
                    down_bytes=received[0] + received[2],
                )
            )
    run = VariantRun(
        variant="bitfit-local" if is_bitfit else "lora-local",
        seed=seed,
        rank=0,
        curve=tuple(curve),
        costs=tuple(alone),
        batches=job.steps_per_epoch,
    )
    if not is_bitfit:
        return [run]
    return [run, msgspec.structs.replace(run, variant="bitfit-split", costs=tuple(split), waits=True)]
