"""How much a job learns from: the figures that costs depend on."""

import math

import numpy as np

from coterie.coordinator.job import LIKELY_MICRO_BATCHES, Job
from coterie.planner.side_bytes import TokenCounts
from coterie.planner.way import RunData
from coterie.tasks.batches import batch_shapes

_FLOAT32_BYTES = 4


def run_data(job: Job) -> RunData:
    """Rows and tokens of one epoch, and the run's steps."""
    train = job.splits["train"]
    epochs = job.recipe.train.epochs
    settings = job.batch_settings(job.recipe.train.micro_batches or LIKELY_MICRO_BATCHES)
    selected = np.array([job.task.count_loss_tokens(row.labels) for row in train.rows])
    batch_rows = job.recipe.train.batch_rows
    return RunData(
        rows=len(train.rows),
        epoch=TokenCounts(
            padded=round(batch_shapes(train.lengths, settings).padded_tokens / epochs),
            real=int(train.lengths.sum()),
            selected=int(selected.sum()),
        ),
        largest=TokenCounts(
            padded=batch_rows * int(train.lengths.max()),
            real=int(np.sort(train.lengths)[-batch_rows:].sum()),
            selected=int(np.sort(selected)[-batch_rows:].sum()),
        ),
        steps_per_epoch=job.steps_per_epoch,
        steps=job.total_steps,
        task_bytes=_FLOAT32_BYTES * sum(math.prod(job.anatomy.shapes[name]) for name in job.anatomy.trainable[-1]),
    )
