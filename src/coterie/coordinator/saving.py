"""A run's state on disk: whole checkpoints at boundaries, and what a manifest says of the run."""

import asyncio
import functools
import importlib.metadata
import math
from collections.abc import Callable, Sequence

from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.resume import check_resume
from coterie.checkpoint.store import CheckpointStore
from coterie.coordinator.job import Job
from coterie.coordinator.shards import keep_state, trained_shapes
from coterie.coordinator.trainer import Trainer

LOSS_TAIL = 50
"""Losses kept in a checkpoint, for people."""


class Saver:
    """Makes the checkpoints of one run.

    Args:
        micro_batches: Of a step, as they are planned once for the whole run.
        losses: Those of the run so far.
    """

    def __init__(
        self, job: Job, store: CheckpointStore, micro_batches: int, losses: Callable[[], Sequence[float]]
    ) -> None:
        self._job = job
        self._store = store
        self._terms = run_terms(job, micro_batches)
        self._losses = losses

    async def save(self, trainer: Trainer, step: int) -> Checkpoint:
        """Collect the state of all stages and make a checkpoint of it.

        Raises:
            StorageError: It cannot be written; the checkpoint before it stays.
            CoterieError: A worker failed, left or fell silent.
        """
        with self._store.begin(step, trained_shapes(self._job.anatomy)) as writer:
            await trainer.save_state(step, lambda unit, frame: keep_state(writer, unit, frame))
            return await asyncio.to_thread(writer.commit, self.manifest(step))

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is one of this run's, and no replica on disk."""
        return checkpoint.folder.parent == self._store.folder

    def manifest(self, step: int) -> Manifest:
        """What is said of the state after `step` steps."""
        job = self._job
        epoch, position = divmod(step, job.steps_per_epoch)
        return Manifest(
            terms=self._terms,
            global_step=step,
            epoch=epoch,
            data_position=position,
            samples_seen=epoch * job.training_rows + position * job.recipe.train.batch_rows,
            base_model=job.recipe.model.name,
            text_field=job.text_field,
            max_tokens=job.recipe.data.max_tokens,
            pairs=job.pairs,
            loss_tail=tuple(loss for loss in self._losses()[-LOSS_TAIL:] if math.isfinite(loss)),
            libraries=libraries(),
        )


def check_resumable(job: Job, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Before any worker is asked: may this job go on from that checkpoint? Notes about allowed differences.

    Raises:
        CheckpointError: Settings differ that the numbers depend on; all of them are named.
    """
    micro_batches = job.recipe.train.micro_batches or checkpoint.manifest.terms.micro_batches
    return check_resume(checkpoint.manifest, run_terms(job, micro_batches), libraries())


def run_terms(job: Job, micro_batches: int) -> RunTerms:
    """What the numbers of this run depend on."""
    return RunTerms(
        run_id=job.run,
        model=job.spec,
        optimizer=job.optimizer,
        seed=job.recipe.train.seed,
        batch_rows=job.recipe.train.batch_rows,
        micro_batches=micro_batches,
        schedule=job.recipe.train.schedule,
        task=job.task.name,
        prompt=job.recipe.data.prompt or "",
        group_by_length=job.recipe.train.group_by_length,
        lossy_links=job.recipe.plan.lossy_links,
        data_digest=job.data_digest,
        base_digest=job.base_digest,
    )


@functools.cache
def libraries() -> dict[str, str]:
    """Versions of what computes the numbers."""
    return {name: importlib.metadata.version(name) for name in ("coterie", "torch", "transformers", "peft")}
