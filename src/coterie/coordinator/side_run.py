"""A side-tuning run: devices run the frozen model once, a server trains the network beside it, the owner fetches it."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from coterie import __version__
from coterie.clock import Clock
from coterie.cluster.messages import PARAMETER, RunSegment, SaveState, Stop
from coterie.cluster.side_messages import (
    TRAIN,
    EvaluateSide,
    GoAlone,
    SideStage,
)
from coterie.coordinator.job import Job
from coterie.coordinator.losses import may_return, take_losses
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.run import door_of
from coterie.coordinator.session import Session
from coterie.coordinator.side_assignment import Held, assign_server, check_trained, side_terms
from coterie.coordinator.side_base import read_base, write_base
from coterie.coordinator.side_books import SideBooks
from coterie.coordinator.side_evaluation import SideEvaluation
from coterie.coordinator.side_feeding import Due, SideFeeder, sent_tokens
from coterie.coordinator.side_planning import ServerForecast, forecast_server, make_side_plan
from coterie.coordinator.side_pump import SidePump
from coterie.coordinator.side_record import SideRunRecord, write_side_run
from coterie.errors import CheckpointError, CoterieError, JoinRefusedError
from coterie.metrics.records import FaultRecord, PlanRecord, StartRecord, SummaryRecord
from coterie.planner.plan import Plan
from coterie.sidetuning.readout import TokenSelector
from coterie.tensors.codecs import decode
from coterie.units import counted, format_seconds


class SideOutcome(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a run leaves.

    Attributes:
        parameters: All that was trained, by the names of `SideModel.parameters`; empty if the server goes on alone.
        plan: Of the devices; None if nothing was left for them to do.
    """

    parameters: dict[str, Tensor]
    plan: Plan | None
    summary: SummaryRecord
    losses: tuple[float, ...]


class SideRun:
    """One run of a job; `session` is what may be ended from outside.

    Args:
        record: As it was written when the run began; of a run that begins, None.
    """

    def __init__(
        self, job: Job, observer: RunObserver, *, record: SideRunRecord | None = None, clock: Clock | None = None
    ) -> None:
        self._job = job
        self._observer = observer
        self._record = record
        self._folder = Path(job.recipe.run.output)
        self._side = job.recipe.side.spec
        self._is_additive = self._side.mode == "additive"
        self._base = read_base(self._folder) if record is not None and self._is_additive else {}
        self._devices_may_leave = False
        self._in_memory = False
        self.session = Session(job, observer, clock=clock, door=door_of(job.recipe, clock))

    async def execute(self) -> SideOutcome:
        """Run to the end, or to where the server goes on alone.

        Raises:
            InterruptedRunError: A stop was requested; what the server has stays.
            CoterieError: What ended the run; what the server has stays.
        """
        return await self.session.run(self._run, advice=lambda: "what the server has is kept: continue with --resume")

    def end_with(self, error: CoterieError) -> None:
        """See `Session.end_with`. Once devices may leave, how a process ends is news only if the server's link ends."""
        if not self._devices_may_leave:
            self.session.end_with(error)

    async def _run(self) -> SideOutcome:
        if not any(worker.role == "server" for worker in self._job.recipe.cluster.local_workers):
            self._observer.notice("one of the workers is the server: `coterie worker LINK --role server`")
        await self.session.gather()
        while True:
            try:
                return await self._train()
            except CoterieError as error:
                await self._gather_again(error)

    async def _gather_again(self, error: CoterieError) -> None:
        """Wait for workers that were lost; what was done so far is then found as a resumed run finds it.

        Raises:
            CoterieError: `error`, if nobody is to be waited for, or did not come.
        """
        losses, limit_s = take_losses(self.session.members, error), self._job.recipe.cluster.rejoin_s
        is_in_vain = self._devices_may_leave and self._in_memory  # its cache went with the server
        if not limit_s or is_in_vain or not all(may_return(loss) for loss in losses):
            raise error
        self._observer.record(FaultRecord(slug=error.slug, message=error.message))
        names = " and ".join(dict.fromkeys(loss.member.hello.name for loss in losses))
        self._observer.notice(f"{error.message}: waiting for {names} to come back, {format_seconds(limit_s)} at most")
        try:
            await self.session.gather_again(server_alone=self._devices_may_leave)
        except JoinRefusedError:
            raise error from None

    async def _train(self) -> SideOutcome:
        """Go on from what the server has to the end, with the workers that are in."""
        session, job = self.session, self._job
        (server,) = session.members.with_role("server")
        selector = TokenSelector(job.spec, self._side)
        ready, held = await assign_server(job, session.members, server, selector, self._evaluated)
        self._in_memory = ready.in_memory
        forecast = forecast_server(job, server, ready, self._cached_tokens(selector))
        plan, micro_batches = await self._plan_devices(ready.step, held, forecast)
        feeder = SideFeeder(job, selector, micro_batches)
        books = SideBooks(job, server, feeder.training, self._observer.record, session.clock)
        books.server_stands(forecast, ready.cache_bytes, sum(len(job.splits[split].rows) for split in held))
        session.members.on_heartbeat = books.heartbeat
        evaluations = {
            split: SideEvaluation(job, split, feeder, self._base.get(split, {})) for split in self._evaluated
        }
        pump = SidePump(session.members, server, feeder, books, evaluations)
        pump.steps_done = ready.step
        self._observer.record(self._start(ready.step))
        if plan is not None:
            books.planned(plan)
            await self._start_devices(plan, pump)
        first = self._due_first(feeder, ready.step, held)
        trained = await self._run_epochs(pump, feeder, books, evaluations, first)
        parameters = await self._fetch(pump, books) if trained else {}
        summary = books.summary(job.recipe.run.output)
        self._observer.record(summary)
        return SideOutcome(parameters=parameters, plan=plan, summary=summary, losses=tuple(books.losses))

    @property
    def _evaluated(self) -> tuple[str, ...]:
        """The splits beside training's that the server is to hold."""
        wanted = ("dev", "test") if self._job.recipe.run.evaluate_every_epoch else ("test",)
        return tuple(split for split in wanted if split in self._job.splits)

    def _cached_tokens(self, selector: TokenSelector) -> int:
        """How many the server's cache is to hold."""
        job = self._job
        tokens = sum(sent_tokens(job, selector, split) for split in self._evaluated)
        if self._side.two_phases:
            part = min(job.total_steps / job.steps_per_epoch, 1.0)
            tokens += round(part * sent_tokens(job, selector, TRAIN))
        return tokens

    def _start(self, step: int) -> StartRecord:
        job = self._job
        if step:
            self._observer.notice(f"the server continues after step {step} of {job.total_steps}")
        return StartRecord(
            run=job.run,
            package_version=__version__,
            model=job.source.name,
            total_steps=job.total_steps,
            steps_per_epoch=job.steps_per_epoch,
            first_step=step,
        )

    # ---- the devices

    async def _plan_devices(self, step: int, held: Held, server: ServerForecast) -> tuple[Plan | None, int]:
        """The plan of the devices, or None if nothing is left for them; how many micro-batches a step has."""
        record = self._record
        if not self._needs_devices(step, held):
            assert record is not None
            await self._release_devices()
            return None, record.micro_batches
        if not self.session.members.with_role("device"):
            lacking = sum(len(self._job.splits[split].rows) - len(rows) for split, rows in held.items())
            raise CheckpointError(
                f"the server lacks the activations of {counted(lacking, 'row')}, and no device has joined",
                hint="give the server the cache folder that it had; or train anew, without --resume, in another folder",
            )
        cluster = await self.session.measure()
        known = record.micro_batches if record else None
        plan, explanation = make_side_plan(self._job, cluster, server, micro_batches=known)
        self._observer.planned(plan, explanation, self._job.total_steps - step)
        self._observer.record(PlanRecord.of(plan))
        if record is None:
            self._note(plan.micro_batches)
        return plan, plan.micro_batches

    def _needs_devices(self, step: int, held: Held) -> bool:
        """Whether rows are to be forwarded in this session; that differences are known needs devices, too."""
        if self._record is None or (not self._side.two_phases and step < self._job.total_steps):
            return True
        if self._is_additive and not self._base.keys() >= set(self._evaluated):
            return True
        return any(self._lacks(split, held[split]) for split in held if split != TRAIN or self._side.two_phases)

    def _lacks(self, split: str, held: frozenset[int]) -> bool:
        if split == TRAIN and self._job.total_steps < self._job.steps_per_epoch:
            return True  # a run of less than an epoch needs some rows only: `due_in_steps` says which
        return len(held) < len(self._job.splits[split].rows)

    def _note(self, micro_batches: int) -> None:
        """Write down what a resumed run must know."""
        self._record = SideRunRecord(run=self._job.run, micro_batches=micro_batches, terms=side_terms(self._job))
        write_side_run(self._folder, self._record)

    async def _start_devices(self, plan: Plan, pump: SidePump) -> None:
        """Hand out the backbone; devices that the plan leaves out may go."""
        side = SideStage(side=self._side, server=pump.server.worker)
        await self.session.hand_out(plan, None, side=side)
        members = self.session.members
        pump.devices = tuple(members.by_id[stage.worker] for stage in plan.stages)
        pump.is_additive = self._is_additive
        last = self._job.anatomy.unit_count - 2
        taps = [stage for stage in plan.stages if min(stage.stop_unit - 1, last) >= self._side.first_layer]
        pump.parts = len(taps) + (pump.is_additive and plan.stages[-1] not in taps)

    async def _release_devices(self) -> None:
        """Their part is done."""
        self._devices_may_leave = True
        members = self.session.members
        for member in members.with_role("device"):
            await members.release(member, Stop(reason="everything is collected", goes_on=True))

    # ---- both

    def _due_first(self, feeder: SideFeeder, step: int, held: Held) -> list[Due]:
        """What the devices are to run first: all that the server lacks, or without two phases this epoch's rows."""
        job = self._job
        per_epoch, total = job.steps_per_epoch, job.total_steps
        due: list[Due] = []
        if self._side.two_phases:
            due += feeder.due_in_steps(0, min(per_epoch, total), held[TRAIN])
        elif step < total:
            due += feeder.due_in_steps(step, min((step // per_epoch + 1) * per_epoch, total))
        for split in self._evaluated:
            again = self._is_additive and split not in self._base  # also for the backbone's own logits
            due += feeder.due_of_split(split, frozenset() if again else held[split])
        return due

    async def _run_epochs(
        self,
        pump: SidePump,
        feeder: SideFeeder,
        books: SideBooks,
        evaluations: Mapping[str, SideEvaluation],
        first: list[Due],
    ) -> bool:
        """All steps that are left, with what they need; False if the server goes on alone."""
        job = self._job
        step, total, due = pump.steps_done, job.total_steps, first
        books.training_begins()
        if step == total:
            await self._collect(pump, books, due, evaluations)
        while step < total:
            stop = min((step // job.steps_per_epoch + 1) * job.steps_per_epoch, total)
            await self._announce(pump, feeder, step, stop)
            await self._collect(pump, books, due, evaluations)
            if job.recipe.side.leave_after_collect and stop < total:
                await self._leave(pump, feeder, stop)
                return False
            await pump.until_step(stop)
            step = stop
            due = []
            if not self._side.two_phases and step < total:
                due = list(feeder.due_in_steps(step, min(step + job.steps_per_epoch, total)))
            if step < total:
                await self._evaluate(pump, books, evaluations, "dev")
        for split in ("dev", "test"):
            await self._evaluate(pump, books, evaluations, split)
        return True

    async def _announce(self, pump: SidePump, feeder: SideFeeder, step: int, stop: int) -> None:
        """Let the server train steps of one epoch, as soon as it has their rows."""
        epoch = step // self._job.steps_per_epoch
        await pump.server.send_frame(feeder.order_frame(epoch, step, self._job.run, pump.server.worker))
        await pump.server.send(RunSegment(schedule="flush", first_step=step, steps=stop - step, micro_batches=1))

    async def _collect(
        self, pump: SidePump, books: SideBooks, due: list[Due], evaluations: Mapping[str, SideEvaluation]
    ) -> None:
        if pump.devices:
            await pump.feed(due)
            if self._is_additive and self._base.keys() != evaluations.keys():
                self._base = {split: evaluation.base for split, evaluation in evaluations.items()}
                write_base(self._folder, self._base)
            books.collected()
            if self._side.two_phases:
                pump.devices = ()
                await self._release_devices()
                self._observer.notice("everything is collected: the devices may leave")

    async def _leave(self, pump: SidePump, feeder: SideFeeder, step: int) -> None:
        """Give the server all the steps that are left, and go."""
        job = self._job
        while step < job.total_steps:
            stop = min(step + job.steps_per_epoch, job.total_steps)
            await self._announce(pump, feeder, step, stop)
            step = stop
        await pump.server.send(GoAlone(limit_s=job.recipe.side.alone_hours * 3600))
        await pump.until(lambda: pump.is_alone)
        assert self._record is not None
        write_side_run(self._folder, msgspec.structs.replace(self._record, is_alone=True))

    async def _evaluate(
        self, pump: SidePump, books: SideBooks, evaluations: Mapping[str, SideEvaluation], split: str
    ) -> None:
        if split not in evaluations:
            return
        start_s = self.session.clock.now()
        pump.predictions.clear()
        pump.evaluated.pop(split, None)
        await pump.server.send(EvaluateSide(split=split))
        await pump.until(lambda: split in pump.evaluated)
        predicted = evaluations[split].predictions(pump.predictions)
        seconds = self.session.clock.now() - start_s
        books.evaluation(evaluations[split].record(predicted, pump.evaluated[split], pump.steps_done, seconds))
        books.training_begins()

    async def _fetch(self, pump: SidePump, books: SideBooks) -> dict[str, Tensor]:
        """What was trained."""
        await pump.server.send(SaveState(step=pump.steps_done))
        await pump.until(lambda: pump.has_state)
        books.fetched_bytes = sum(frame.payload_bytes for frame in pump.state)
        parameters: dict[str, Tensor] = {}
        for frame in pump.state:
            for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True):
                parameters[spec.name.removeprefix(PARAMETER)] = decode(spec, buffer)
        check_trained(self._job, parameters)
        return parameters
