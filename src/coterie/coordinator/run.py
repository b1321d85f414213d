"""A run from the open port to the saved model: join, measure, plan, hand out, train, evaluate, save."""

import asyncio
import importlib.metadata
import math
from pathlib import Path

import msgspec

from coterie import __version__
from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.resume import check_resume
from coterie.checkpoint.store import CheckpointStore
from coterie.clock import Clock
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.door import DOOR, Door
from coterie.coordinator.evaluation import evaluate_split
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.segments import boundaries, cut_segments
from coterie.coordinator.session import Session
from coterie.coordinator.shards import keep_state, trained_shapes
from coterie.coordinator.trainer import Trainer
from coterie.errors import InterruptedRunError, NonFiniteLossError
from coterie.metrics.records import PlanRecord, StartRecord, SummaryRecord
from coterie.planner.plan import Plan
from coterie.units import format_seconds

LOSS_TAIL = 50
"""Losses kept in a checkpoint, for people."""

ROWS_SHOWN = 16
"""Rows named in a message at most."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a finished run leaves."""

    plan: Plan
    summary: SummaryRecord
    losses: tuple[float, ...]
    checkpoint: Checkpoint


class TrainingRun:
    """One run of a job on whichever workers join; `session` is what may be ended from outside."""

    def __init__(self, job: Job, observer: RunObserver, store: CheckpointStore, *, clock: Clock | None = None) -> None:
        self._job = job
        self._observer = observer
        self._store = store
        run = job.recipe.run
        door = Door(Path(run.output) / DOOR, clock=clock, reopen=run.resume)
        self.session = Session(job, observer, clock=clock, door=door)

    async def execute(self, resume_from: Checkpoint | None = None) -> RunOutcome:
        """Run to the end.

        Raises:
            InterruptedRunError: A stop was requested; a checkpoint was kept.
            CoterieError: What ended the run; checkpoints made before stay.
        """
        return await self.session.run(
            lambda: self._train(resume_from),
            advice=self._how_to_go_on,
        )

    def _how_to_go_on(self) -> str:
        steps = self._store.steps()
        if not steps:
            return ""
        return f"the checkpoint of step {steps[-1]} of {self._job.total_steps} is kept: continue with --resume"

    async def _train(self, resume_from: Checkpoint | None) -> RunOutcome:
        session, clock = self.session, self.session.clock
        await session.gather()
        plan, explanation = await session.plan(
            micro_batches=resume_from.manifest.terms.micro_batches if resume_from else None
        )
        first_step = resume_from.step if resume_from else 0
        if first_step:
            self._observer.notice(f"continuing after step {first_step} of {self._job.total_steps}")
        self._observer.planned(plan, explanation, self._job.total_steps - first_step)
        self._observer.record(PlanRecord.of(plan))
        self._observer.record(self._start(first_step))
        feeder = TrainingFeeder(self._job, plan.micro_batches)
        books = Bookkeeper(self._job, plan, feeder, self._observer.record, clock)
        session.members.on_heartbeat = books.heartbeat
        trainer = Trainer(session.members, plan, feeder, books.step)
        session.pausing.steer(trainer, session.members.wake, on_rested=books.training_begins)
        books.stages_stand(await session.hand_out(plan, resume_from))
        try:
            checkpoint = await self._run_steps(trainer, books, first_step) or resume_from
        except NonFiniteLossError as error:
            raise _with_rows(error, feeder) from error
        session.pausing.refuse("its last step is done")
        if checkpoint is None:
            raise InterruptedRunError("the run was stopped before its first step")
        if "test" in self._job.splits:
            await self._evaluate(trainer, books, "test", self._job.total_steps)
        summary = books.summary(self._job.recipe.run.output)
        self._observer.record(summary)
        return RunOutcome(plan=plan, summary=summary, losses=tuple(books.losses), checkpoint=checkpoint)

    def _start(self, first_step: int) -> StartRecord:
        return StartRecord(
            run=self._job.run,
            package_version=__version__,
            model=self._job.source.name,
            total_steps=self._job.total_steps,
            steps_per_epoch=self._job.steps_per_epoch,
            first_step=first_step,
        )

    async def _run_steps(self, trainer: Trainer, books: Bookkeeper, first_step: int) -> Checkpoint | None:
        """All steps from `first_step` on, with checkpoints and evaluations where they fall; the last checkpoint."""
        job = self._job
        self.session.stop.on_first = lambda: self._ask_to_stop(trainer)
        per_epoch = job.steps_per_epoch
        points = boundaries(
            first_step, job.total_steps, steps_per_epoch=per_epoch, checkpoint_every=job.recipe.run.checkpoint_every
        )
        checkpoint: Checkpoint | None = None
        step = first_step
        for point in points:
            books.training_begins()
            step = await trainer.run(cut_segments(trainer.plan.schedule, step, point))
            checkpoint = await self._save(trainer, books, step)
            if trainer.stop_requested and step < job.total_steps:
                raise InterruptedRunError(
                    f"the run was stopped after step {step} of {job.total_steps}; a checkpoint was kept",
                    hint="continue with --resume",
                )
            if step % per_epoch == 0 or step == job.total_steps:
                await self._evaluate_epoch(trainer, books, step)
        if not points:  # resumed after the last step: only what comes after it is left to do
            await self._evaluate_epoch(trainer, books, step)
        return checkpoint

    async def _evaluate_epoch(self, trainer: Trainer, books: Bookkeeper, step: int) -> None:
        if "dev" in self._job.splits and self._job.recipe.run.evaluate_every_epoch:
            await self._evaluate(trainer, books, "dev", step)

    async def _evaluate(self, trainer: Trainer, books: Bookkeeper, split: str, step: int) -> None:
        try:
            books.evaluation(await evaluate_split(trainer, self._job, split, step, self.session.clock))
        except NonFiniteLossError as error:
            raise NonFiniteLossError(
                f"after step {step} the loss on the {split} data is not finite", hint=error.hint
            ) from error

    def _ask_to_stop(self, trainer: Trainer) -> bool:
        trainer.stop_requested = True
        when = ""
        if trainer.plan.schedule not in ("flush", "gpipe"):
            when = " at the next checkpoint or the end of the epoch, where the pipeline is empty"
        self._observer.notice(f"stopping{when}: a checkpoint is made first (ask again to stop at once)")
        return True

    async def _save(self, trainer: Trainer, books: Bookkeeper, step: int) -> Checkpoint:
        job = self._job
        with self._store.begin(step, trained_shapes(job.anatomy)) as writer:
            await trainer.save_state(step, lambda unit, frame: keep_state(writer, unit, frame))
            epoch, position = divmod(step, job.steps_per_epoch)
            manifest = Manifest(
                terms=run_terms(job, trainer.plan.micro_batches),
                global_step=step,
                epoch=epoch,
                data_position=position,
                samples_seen=epoch * job.training_rows + position * job.recipe.train.batch_rows,
                base_model=job.recipe.model.name,
                text_field=job.text_field,
                max_tokens=job.recipe.data.max_tokens,
                pairs=job.pairs,
                loss_tail=tuple(loss for loss in books.losses[-LOSS_TAIL:] if math.isfinite(loss)),
                libraries=_libraries(),
            )
            return await asyncio.to_thread(writer.commit, manifest)


def _with_rows(error: NonFiniteLossError, feeder: TrainingFeeder) -> NonFiniteLossError:
    """The same error with the rows that were in the batch."""
    if error.step < 0:
        return error
    step = feeder.rows(error.step)
    rows = step.micro_batches[error.micro_batch] if error.micro_batch >= 0 else step.rows
    shown = ", ".join(map(str, rows[:ROWS_SHOWN])) + (" …" if len(rows) > ROWS_SHOWN else "")
    return NonFiniteLossError(
        f"{error.message}; rows of the training data in it, from 0: {shown}",
        hint=error.hint,
        step=error.step,
        micro_batch=error.micro_batch,
    )


def check_resumable(job: Job, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Before any worker is asked: may this job go on from that checkpoint? Notes about allowed differences.

    Raises:
        CheckpointError: Settings differ that the numbers depend on; all of them are named.
    """
    micro_batches = job.recipe.train.micro_batches or checkpoint.manifest.terms.micro_batches
    return check_resume(checkpoint.manifest, run_terms(job, micro_batches), _libraries())


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


def estimate(plan: Plan, steps: int) -> str:
    """How long the steps of a plan will take, for people."""
    return format_seconds(plan.predicted_step_s * steps)


def _libraries() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("coterie", "torch", "transformers", "peft")}
