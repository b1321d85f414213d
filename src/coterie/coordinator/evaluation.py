"""Quality on held-out data, by the same pipeline, forward only."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from coterie.clock import Clock
from coterie.coordinator.feeders import EvaluationFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.trainer import Trainer
from coterie.errors import ProtocolError
from coterie.metrics.records import EvaluationRecord
from coterie.tasks.examples import EncodedExample, PredictedArray
from coterie.tasks.task import Task
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame


async def predict_split(
    trainer: Trainer, job: Job, split: str, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> tuple[dict[int, PredictedArray], float]:
    """The task's predictions for every row of a split, and the loss summed over its labels.

    `progress` is told how many rows of how many are done.

    Returns:
        Predictions by row index, each (T,) or (), T including padding; the loss sum.

    Raises:
        ProtocolError: What the last stage sent is no prediction of these rows.
    """
    feeder = EvaluationFeeder(job, split, trainer.plan.micro_batches)
    predicted: dict[int, PredictedArray] = {}

    def take(step: int, frame: Frame) -> None:
        rows = feeder.rows(step)
        if len(frame.buffers) != 1:
            raise ProtocolError(f"predictions came as {len(frame.buffers)} tensors instead of one")
        array: PredictedArray = decode(frame.header.tensors[0], frame.buffers[0]).numpy()
        check_predictions(array, [job.splits[split].rows[row] for row in rows], job.task)
        predicted.update(zip(rows, array, strict=True))
        progress(len(predicted), len(job.splits[split].rows))

    loss_sum = await trainer.forward(feeder, feeder.steps, take)
    return predicted, loss_sum


def check_predictions(array: PredictedArray, rows: Sequence[EncodedExample], task: Task) -> None:
    """Are these predictions of `rows`? Figures made of any others would be wrong, or end in an error far from here.

    Raises:
        ProtocolError: Type or shape is another, or a label is none of the task's.
    """
    wanted = rows[0].labels
    longest = max(row.tokens for row in rows)
    fits = array.shape[1:] == () if wanted.ndim == 0 else array.ndim == 2 and array.shape[1] >= longest
    if array.shape[:1] != (len(rows),) or array.dtype != wanted.dtype or not fits:
        raise ProtocolError(
            f"predictions of {len(rows)} rows of up to {longest} tokens came as {array.dtype} {array.shape}"
        )
    if task.labels and array.size and not 0 <= int(array.min()) <= int(array.max()) < len(task.labels):
        raise ProtocolError(f"a predicted label is none of the {len(task.labels)} labels")


async def evaluate_split(trainer: Trainer, job: Job, split: str, step: int, clock: Clock) -> EvaluationRecord:
    """Predict a split and count."""
    start_s = clock.now()
    predicted, loss_sum = await predict_split(trainer, job, split)
    record = score(job, split, predicted, loss_sum)
    return msgspec.structs.replace(
        record, step=step, epoch=-(-step // job.steps_per_epoch), seconds=clock.now() - start_s
    )


def score(job: Job, split: str, predicted: Mapping[int, PredictedArray], loss_sum: float) -> EvaluationRecord:
    """The figures of a split's predictions; `predicted` as `predict_split` gives them."""
    data = job.splits[split]
    metric = job.task.metric()
    for row in range(len(data.rows)):
        metric.add(data.examples[row], data.rows[row], predicted[row])
    tokens = data.summary.loss_tokens
    mean_loss = loss_sum / tokens if tokens else None
    figures = metric.result(mean_loss)
    shown = tuple(dict.fromkeys((job.task.main_metric, *job.task.shares)))
    return EvaluationRecord(
        split=split,
        step=0,
        epoch=0,
        loss=mean_loss,
        metrics={name: figures[name] for name in shown},
        main_metric=job.task.main_metric,
        main_is_share=job.task.main_metric in job.task.shares,
        seconds=0.0,
        report=metric.report(mean_loss),
        details={name: figure for name, figure in figures.items() if name not in shown},
    )
