"""Micro-batches of training and of evaluation, made from a job's encoded rows when they are due."""

from collections.abc import Sequence

import numpy as np

from coterie.cluster.messages import BatchBody
from coterie.coordinator.feeding import FedMicroBatch
from coterie.coordinator.job import Job
from coterie.tasks.batches import StepRows, plan_steps
from coterie.tasks.collate import collate
from coterie.tasks.examples import EncodedExample

MOST_EVALUATION_ROWS = 32
"""Rows of an evaluation micro-batch at most: more gain nothing, and fewer stages would be busy at once."""


class TrainingFeeder:
    """Micro-batches of a run's optimizer steps."""

    def __init__(self, job: Job, micro_batches: int) -> None:
        self._job = job
        steps = plan_steps(job.splits["train"].lengths, job.batch_settings(micro_batches))
        self._steps: tuple[StepRows, ...] = tuple(step for step in steps if step.step < job.total_steps)

    def rows(self, step: int) -> StepRows:
        """Which rows a step takes."""
        return self._steps[step]

    def tokens(self, step: int) -> int:
        """Tokens of a step, padding left out."""
        return sum(self._job.splits["train"].rows[row].tokens for row in self._steps[step].rows)

    def load(self, step: int) -> float:
        """Padded tokens of a step, as a multiple of those that a plan counts with."""
        rows = self._job.splits["train"].rows
        parts = [part for part in self._steps[step].micro_batches if len(part)]
        padded = sum(len(part) * max(rows[row].tokens for row in part) for part in parts)
        usual = self._job.recipe.train.batch_rows * self._job.model_profile.typical_tokens
        return padded / usual

    def micro_batches(self, step: int) -> tuple[FedMicroBatch, ...]:
        """See `Feeder`."""
        rows = self._job.splits["train"].rows
        parts = self._steps[step].micro_batches
        counts = [sum(self._job.task.count_loss_tokens(rows[row].labels) for row in part) for part in parts]
        seen = self._steps[step].samples_seen
        fed = []
        for part, count in zip(parts, counts, strict=True):
            fed.append(_fed(self._job, [rows[row] for row in part], count, sum(counts), seen))
            seen += len(part)
        return tuple(fed)


class EvaluationFeeder:
    """Micro-batches of one split, longest rows first, each a step of its own.

    None has more padded tokens than the longest of training's: what the plan found to fit forward and backward fits
    forward alone.
    """

    def __init__(self, job: Job, split: str, micro_batches: int) -> None:
        self._job = job
        self._rows = job.splits[split].rows
        order = np.argsort(-job.splits[split].lengths, kind="stable").tolist()
        rows = -(-job.recipe.train.batch_rows // micro_batches)
        self._parts = _by_tokens(order, self._rows, rows * job.model_profile.memory_tokens)

    @property
    def steps(self) -> int:
        """How many micro-batches."""
        return len(self._parts)

    def rows(self, step: int) -> list[int]:
        """Indices of the rows in a micro-batch."""
        return self._parts[step]

    def micro_batches(self, step: int) -> tuple[FedMicroBatch, ...]:
        """See `Feeder`."""
        part = [self._rows[row] for row in self._parts[step]]
        count = sum(self._job.task.count_loss_tokens(row.labels) for row in part)
        return (_fed(self._job, part, count, count, 0),)


def _by_tokens(order: Sequence[int], rows: Sequence[EncodedExample], most_tokens: int) -> list[list[int]]:
    """Row indices, longest first, in parts of at most `most_tokens` padded tokens; at least one row each."""
    parts: list[list[int]] = []
    start = 0
    while start < len(order):
        count = min(max(most_tokens // rows[order[start]].tokens, 1), MOST_EVALUATION_ROWS)
        parts.append(list(order[start : start + count]))
        start += count
    return parts


def _fed(job: Job, rows: Sequence[EncodedExample], loss_tokens: int, step_tokens: int, seen: int) -> FedMicroBatch:
    arrays = collate(rows, pad_token_id=job.tokenizer.pad_token_id)
    labels = arrays.pop("labels")
    body = BatchBody(
        rows=len(rows), step_loss_tokens=step_tokens, micro_batch_loss_tokens=loss_tokens, samples_seen=seen
    )
    return FedMicroBatch(body, arrays if rows else {}, labels)
