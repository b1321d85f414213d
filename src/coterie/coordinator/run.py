"""A run from the open port to the saved model: join, measure, plan, hand out, train, evaluate, save."""

import asyncio
import importlib.metadata
import math
from pathlib import Path

import msgspec
from aiohttp import web

from coterie import __version__
from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.resume import check_resume
from coterie.checkpoint.store import CheckpointStore
from coterie.clock import Clock, SystemClock
from coterie.cluster.messages import Assign, StageReady, Stop
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.evaluation import evaluate_split
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.gathering import measure_cluster
from coterie.coordinator.job import Job
from coterie.coordinator.members import Members
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.planning import make_run_plan
from coterie.coordinator.segments import boundaries, cut_segments
from coterie.coordinator.shards import ShardSource, keep_state, send_stage, trained_shapes
from coterie.coordinator.stopping import StopRequests
from coterie.coordinator.trainer import Trainer
from coterie.errors import CoterieError, InterruptedRunError, ProtocolError
from coterie.ids import WorkerId
from coterie.metrics.records import FaultRecord, PlanRecord, StartRecord, SummaryRecord
from coterie.planner.plan import Plan
from coterie.transport.addresses import own_addresses
from coterie.transport.join_link import JoinLink, JoinTokens
from coterie.transport.server import FrameServer
from coterie.units import format_seconds

LOSS_TAIL = 50
"""Losses kept in a checkpoint, for people."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a finished run leaves."""

    plan: Plan
    summary: SummaryRecord
    losses: tuple[float, ...]
    checkpoint: Checkpoint


class TrainingRun:
    """One run of a job on whichever workers join. `stop` may be asked to end it from outside."""

    def __init__(self, job: Job, observer: RunObserver, store: CheckpointStore, *, clock: Clock | None = None) -> None:
        self._job = job
        self._observer = observer
        self._store = store
        self._clock = clock or SystemClock()
        self._cluster = job.recipe.cluster
        self._tokens = JoinTokens()
        self._members = Members(
            job.run,
            self._tokens,
            self._clock,
            heartbeat_s=self._cluster.heartbeat_s,
            silence_limit_s=self._cluster.heartbeat_timeout_s,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stop = StopRequests()

    def end_with(self, error: CoterieError) -> None:
        """End the run from another thread: something outside of it has failed, such as a local worker's process."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._members.post, error)

    async def execute(self, resume_from: Checkpoint | None = None) -> RunOutcome:
        """Run to the end.

        Raises:
            InterruptedRunError: A stop was requested; a checkpoint was kept.
            CoterieError: What ended the run; checkpoints made before stay.
        """
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        server = FrameServer(self._members.admit, app=_front_page())
        beat = asyncio.create_task(self._members.beat())
        farewell = "finished"
        try:
            with self.stop.listening(task):
                await server.start(self._cluster.listen_host, self._cluster.port)
                return await self._train(server, resume_from)
        except CoterieError as error:
            farewell = error.message
            self._observer.record(FaultRecord(slug=error.slug, message=error.message))
            raise
        except asyncio.CancelledError:
            if not self.stop.requested:
                raise
            task.uncancel()
            farewell = "stopped"
            raise InterruptedRunError(
                "the run was stopped", hint="continue from the last checkpoint with --resume"
            ) from None
        finally:
            beat.cancel()
            await self._members.dismiss(Stop(reason=farewell))
            await server.close()

    async def _train(self, server: FrameServer, resume_from: Checkpoint | None) -> RunOutcome:
        await self._gather(server)
        plan = await self._plan(resume_from)
        first_step = resume_from.step if resume_from else 0
        feeder = TrainingFeeder(self._job, plan.micro_batches)
        books = Bookkeeper(self._job, plan, feeder, self._observer.record, self._clock)
        self._members.on_heartbeat = books.heartbeat
        trainer = Trainer(self._members, plan, feeder, books.step)
        await self._hand_out(plan, resume_from, books)
        self._observer.record(
            StartRecord(
                run=self._job.run,
                package_version=__version__,
                model=self._job.source.name,
                total_steps=self._job.total_steps,
                steps_per_epoch=self._job.steps_per_epoch,
                first_step=first_step,
            )
        )
        checkpoint = await self._run_steps(trainer, books, first_step) or resume_from
        if checkpoint is None:
            raise InterruptedRunError("the run was stopped before its first step")
        if "test" in self._job.splits:
            books.evaluation(await evaluate_split(trainer, self._job, "test", self._job.total_steps, self._clock))
        summary = books.summary(self._job.recipe.run.output)
        self._observer.record(summary)
        return RunOutcome(plan=plan, summary=summary, losses=tuple(books.losses), checkpoint=checkpoint)

    async def _gather(self, server: FrameServer) -> None:
        """Publish the join link and wait for the workers."""
        wanted = self._cluster.workers_expected
        local = self._cluster.listen_host in ("127.0.0.1", "localhost", "::1")
        join = JoinLink(
            hosts=("127.0.0.1",) if local else own_addresses(),
            port=server.port,
            fingerprint=server.fingerprint,
            token=self._tokens.issue(uses=wanted),
        )
        self._observer.joinable(join.to_text())
        self._observer.notice(f"waiting for {wanted} worker{'s' if wanted > 1 else ''}")
        await self._members.wait_for(wanted, self._cluster.join_timeout_s)

    async def _plan(self, resume_from: Checkpoint | None) -> Plan:
        recipe = self._job.recipe
        rows = max(recipe.train.batch_rows // 4, 1), max(recipe.train.batch_rows, 2)
        cluster = await measure_cluster(self._members, self._job.spec, self._job.model_profile, rows, self._observer)
        fixed = resume_from.manifest.terms.micro_batches if resume_from else None
        plan, explanation = make_run_plan(self._job, cluster, micro_batches=fixed)
        self._observer.planned(plan, explanation, self._job.total_steps)
        self._observer.record(PlanRecord.of(plan))
        return plan

    async def _hand_out(self, plan: Plan, resume_from: Checkpoint | None, books: Bookkeeper) -> None:
        """Give each stage its assignment and weights, and wait until all are built."""
        source = ShardSource(self._job.anatomy, self._job.weights, resume_from)
        tied = self._tied_peers(plan)
        for stage in plan.stages:
            member = self._members.by_id[stage.worker]
            trained_below = any(self._job.anatomy.trainable[: stage.first_unit])
            await member.send(
                Assign(
                    run=self._job.run,
                    plan=plan,
                    stage=stage.stage,
                    spec=self._job.spec,
                    optimizer=self._job.optimizer,
                    task=self._job.task.name,
                    gradient_below=trained_below,
                    tied_peer=tied.get(stage.worker, WorkerId("")),
                    resumed_step=resume_from.step if resume_from else 0,
                )
            )
            await send_stage(member, plan, stage.stage, source, self._job.run)
        waiting = {stage.worker for stage in plan.stages}
        while waiting:
            event = await self._members.next_event()
            if not isinstance(event.message, StageReady):
                raise ProtocolError(f"{event.member.hello.name} sent {event.frame.header.kind} before its stage stood")
            waiting.discard(event.member.worker)
            books.base_bytes[event.member.worker] = event.message.base_bytes
            books.link_paths[event.member.worker] = event.message.link_to_next

    def _tied_peers(self, plan: Plan) -> dict[WorkerId, WorkerId]:
        """Who exchanges the gradient of a trained tied matrix with whom."""
        tied = self._job.anatomy.tied
        first, last = plan.stages[0].worker, plan.stages[-1].worker
        trained = tied is not None and any(tied.name in names for names in self._job.anatomy.trainable)
        return {first: last, last: first} if trained and first != last else {}

    async def _run_steps(self, trainer: Trainer, books: Bookkeeper, first_step: int) -> Checkpoint | None:
        """All steps from `first_step` on, with checkpoints and evaluations where they fall; the last checkpoint."""
        job = self._job
        self.stop.on_first = lambda: self._ask_to_stop(trainer)
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
            ends_epoch = step % per_epoch == 0 or step == job.total_steps
            if ends_epoch and "dev" in job.splits and job.recipe.run.evaluate_every_epoch:
                books.evaluation(await evaluate_split(trainer, job, "dev", step, self._clock))
        return checkpoint

    def _ask_to_stop(self, trainer: Trainer) -> bool:
        trainer.stop_requested = True
        self._observer.notice("stopping: a checkpoint is made first (ask again to stop at once)")
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
                loss_tail=tuple(loss for loss in books.losses[-LOSS_TAIL:] if math.isfinite(loss)),
                libraries=_libraries(),
            )
            return await asyncio.to_thread(writer.commit, manifest)


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
        data_digest=job.data_digest,
        base_digest=job.base_digest,
    )


def estimate(plan: Plan, steps: int) -> str:
    """How long the steps of a plan will take, for people."""
    return format_seconds(plan.predicted_step_s * steps)


def _libraries() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("coterie", "torch", "transformers", "peft")}


def _front_page() -> web.Application:
    """What a browser sees at the port: that this is a coordinator, and nothing about the run."""

    async def front(_request: web.Request) -> web.Response:
        return web.Response(text=f"coterie {__version__} coordinator\n")

    app = web.Application()
    app.router.add_get("/", front)
    return app


def checkpoint_folder(output: str) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(output) / "checkpoints"
