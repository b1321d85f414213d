"""A run from the open port to the saved model: join, measure, plan, hand out, train, evaluate, save."""

import asyncio
from pathlib import Path

import msgspec

from coterie import __version__
from coterie.checkpoint.names import replica_folder
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.store import CheckpointStore
from coterie.clock import Clock
from coterie.config.recipe import Recipe
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.course import Course
from coterie.coordinator.door import DOOR, Door
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.planning import make_job_plan
from coterie.coordinator.replica_folder import ReplicaFolder
from coterie.coordinator.saving import Saver
from coterie.coordinator.session import Session
from coterie.coordinator.shards import trained_shapes
from coterie.coordinator.supervisor import Supervisor
from coterie.coordinator.watch import Watch
from coterie.errors import NonFiniteLossError
from coterie.metrics.records import PlanRecord, StartRecord, SummaryRecord
from coterie.planner.plan import Plan
from coterie.transport.user_settings import config_folder

ROWS_SHOWN = 16
"""Rows named in a message at most."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a finished run leaves; `plan` is the last one."""

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
        door = door_of(job.recipe, clock)
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
        replicas = CheckpointStore(replica_folder(self._job.recipe.run.output))
        step = max((*self._store.steps(), *replicas.steps()), default=0)
        if not step:
            return ""
        return f"the state after step {step} of {self._job.total_steps} is kept: continue with --resume"

    async def _train(self, resume_from: Checkpoint | None) -> RunOutcome:
        session, job = self.session, self._job
        await session.gather()
        cluster = await session.measure()
        micro_batches = resume_from.manifest.terms.micro_batches if resume_from else None
        owners = session.members.owner_workers
        plan, explanation = await asyncio.to_thread(  # heartbeats go on
            make_job_plan, job, cluster, micro_batches=micro_batches, owner_workers=owners
        )
        first_step = resume_from.step if resume_from else 0
        if first_step:
            self._observer.notice(f"continuing after step {first_step} of {job.total_steps}")
        self._observer.planned(plan, explanation, job.total_steps - first_step)
        self._observer.record(PlanRecord.of(plan))
        self._observer.record(self._start(first_step))
        feeder = TrainingFeeder(job, plan.micro_batches)
        books = Bookkeeper(job, plan, feeder, self._observer.record, session.clock)
        supervisor = Supervisor(
            job,
            session,
            self._observer,
            books=books,
            feeder=feeder,
            cluster=cluster,
            plan=plan,
            first_step=first_step,
            state=resume_from,
        )
        watch = Watch(job, session, self._observer, books=books, feeder=feeder, supervisor=supervisor)
        saver = Saver(job, self._store, plan.micro_batches, lambda: books.losses)
        course = Course(job, session, self._observer, books=books, supervisor=supervisor, watch=watch, saver=saver)
        folder = ReplicaFolder(
            CheckpointStore(replica_folder(job.recipe.run.output), run_id=job.run),
            trained_shapes(job.anatomy),
            saver.manifest,
            session.clock,
            self._observer.notice,
        )
        supervisor.on_commit = folder.offer
        try:
            checkpoint = await course.run(resume_from)
        except NonFiniteLossError as error:
            raise _with_rows(error, feeder) from error
        finally:
            await watch.close()
            folder.superseded(max((*self._store.steps(), first_step)))
            await folder.close()
        folder.remove()
        summary = books.summary(job.recipe.run.output)
        self._observer.record(summary)
        return RunOutcome(plan=supervisor.plan, summary=summary, losses=tuple(books.losses), checkpoint=checkpoint)

    def _start(self, first_step: int) -> StartRecord:
        return StartRecord(
            run=self._job.run,
            package_version=__version__,
            model=self._job.source.name,
            total_steps=self._job.total_steps,
            steps_per_epoch=self._job.steps_per_epoch,
            first_step=first_step,
        )


def door_of(recipe: Recipe, clock: Clock | None = None) -> Door:
    """The run's own door, or the one that this user's runs have in common; see `ClusterSection.standing_link`."""
    if recipe.cluster.standing_link:
        return Door(config_folder() / DOOR, clock=clock, standing=True)
    return Door(Path(recipe.run.output) / DOOR, clock=clock, reopen=recipe.run.resume)


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
