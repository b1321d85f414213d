"""Quality on held-out data, by the same pipeline, forward only."""

from collections.abc import Mapping

import msgspec
import numpy as np

from coterie.clock import Clock
from coterie.coordinator.feeders import EvaluationFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.trainer import Trainer
from coterie.errors import ProtocolError
from coterie.metrics.records import EvaluationRecord
from coterie.tasks.examples import IntArray
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame


async def predict_split(trainer: Trainer, job: Job, split: str) -> tuple[dict[int, IntArray], float]:
    """The task's predictions for every row of a split, and the loss summed over its labels.

    Returns:
        Predictions by row index, each (T,) or (), T including padding; the loss sum.

    Raises:
        ProtocolError: The last stage sent predictions of another shape.
    """
    feeder = EvaluationFeeder(job, split, trainer.plan.micro_batches)
    predicted: dict[int, IntArray] = {}

    def take(step: int, frame: Frame) -> None:
        rows = feeder.rows(step)
        if len(frame.buffers) != 1:
            raise ProtocolError(f"predictions came as {len(frame.buffers)} tensors instead of one")
        array: IntArray = decode(frame.header.tensors[0], frame.buffers[0]).numpy()
        if array.shape[:1] != (len(rows),) or not np.issubdtype(array.dtype, np.integer):
            raise ProtocolError(f"predictions of {len(rows)} rows came as {array.dtype} {array.shape}")
        predicted.update(zip(rows, array, strict=True))

    loss_sum = await trainer.forward(feeder, feeder.steps, take)
    return predicted, loss_sum


async def evaluate_split(trainer: Trainer, job: Job, split: str, step: int, clock: Clock) -> EvaluationRecord:
    """Predict a split and count."""
    start_s = clock.now()
    predicted, loss_sum = await predict_split(trainer, job, split)
    record = score(job, split, predicted, loss_sum)
    return msgspec.structs.replace(
        record, step=step, epoch=-(-step // job.steps_per_epoch), seconds=clock.now() - start_s
    )


def score(job: Job, split: str, predicted: Mapping[int, IntArray], loss_sum: float) -> EvaluationRecord:
    """The figures of a split's predictions; `predicted` as `predict_split` gives them."""
    data = job.splits[split]
    metric = job.task.metric()
    for row in range(len(data.rows)):
        metric.add(data.examples[row], data.rows[row], predicted[row])
    tokens = data.summary.loss_tokens
    figures = metric.result()
    return EvaluationRecord(
        split=split,
        step=0,
        epoch=0,
        loss=loss_sum / tokens if tokens else None,
        metrics={name: figures[name] for name in job.task.shares},
        main_metric=job.task.main_metric,
        seconds=0.0,
        report=metric.report(),
        details={name: figure for name, figure in figures.items() if name not in job.task.shares},
    )
