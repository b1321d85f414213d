"""Keeps a run on its feet: lets plans take effect, and makes the next one when a worker is lost, leaves or comes."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import msgspec

from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.trained_state import TrainedState
from coterie.cluster.fault_messages import StandBy
from coterie.cluster.messages import Stop
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.crew import Crew
from coterie.coordinator.departures import Departures
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.ledger import StepEntry
from coterie.coordinator.member import Loss, Member
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.planning import next_request
from coterie.coordinator.replicas import Replica, ReplicaStore
from coterie.coordinator.replication import replicate_every
from coterie.coordinator.session import Session
from coterie.coordinator.shards import trained_shapes
from coterie.coordinator.trainer import Trainer
from coterie.errors import (
    CoterieError,
    DataError,
    DoesNotFitError,
    InterruptedRunError,
    ModelError,
    NonFiniteLossError,
    OutOfMemoryError,
    RecipeError,
    UsageError,
    WorkerLostError,
)
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.measure.budget import memory_budget
from coterie.metrics.fault_records import MembershipChange, MembershipRecord, RebalanceRecord, RecoveryRecord
from coterie.metrics.records import FaultRecord
from coterie.planner import make_plan
from coterie.planner.plan import Plan
from coterie.planner.rebalance import moves, unit_bytes
from coterie.profiles.cluster_profile import ClusterProfile

log = get_logger(__name__)

FATAL = (NonFiniteLossError, ModelError, DataError, RecipeError, UsageError)
"""What another device would end with, too."""

MEMORY_LEFT = 0.9
"""Of a device's limit, for the next plan, when memory ran out under the last one."""

NEWS_S = 0.5
"""How long a run that cannot go on waits for whoever knows how the last worker's process ended."""


class Supervisor:
    """One run's plans, one after the other.

    Args:
        first_step: Optimizer steps done when the run begins, which is where it goes on from before the first commit.
        state: The trained state then; None: the model as it is.
        save: Makes a checkpoint, with no step under way.

    Attributes:
        step: Optimizer steps done.
        trainer: Of the plan in effect.
        on_commit: Told of each replica that has become whole.
        stop_requested: The user wants to stop.
    """

    def __init__(  # noqa: PLR0913 - what a run is made of, most of it named at the call
        self,
        job: Job,
        session: Session,
        observer: RunObserver,
        *,
        books: Bookkeeper,
        feeder: TrainingFeeder,
        cluster: ClusterProfile,
        first_step: int,
        state: TrainedState | None,
    ) -> None:
        self._job = job
        self._session = session
        self._members = session.members
        self._clock = session.clock
        self._observer = observer
        self._books = books
        self._feeder = feeder
        self._first_step = first_step
        self._state = state
        self._replicas = ReplicaStore(trained_shapes(job.anatomy), self._committed)
        self._held: dict[WorkerId, frozenset[int]] = {}
        self._pending: list[tuple[Loss, int, int]] = []
        self._changed = asyncio.Event()
        self._version = 0
        self._every = 0
        self.unit_bytes = unit_bytes(job.model_profile, job.optimizer.state_copies)
        self.crew = Crew(cluster)
        self.departures = Departures()
        self.step = first_step
        self.steps_of_plan = 0
        self.stand_s = 0.0
        self.stop_requested = False
        self.plan: Plan
        self.trainer: Trainer
        self.on_commit: Callable[[Replica], None] = lambda _replica: None
        self.on_step: Callable[[int, StepEntry], None] = lambda _step, _entry: None
        self.save: Callable[[], Awaitable[Checkpoint]]
        self._members.on_left = self._spare_left

    # ---- where training can go on from

    @property
    def committed(self) -> int:
        """The step from which training would go on if a worker were lost now."""
        return self._first_step if self._state is None else self._state.step

    def saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is a place to go on from like any replica."""
        if checkpoint.step > self.committed:
            self._state = checkpoint

    def _committed(self, replica: Replica) -> None:
        if self._state is None or replica.step >= self._state.step:
            self._state = replica
        self.on_commit(replica)

    async def _commit_now(self) -> None:
        """With no step under way: what is done is kept, so that nothing is done again."""
        if self.committed >= self.step:
            return
        if self._every:
            await self.trainer.save_state(self.step, lambda unit, frame: self._replicas.put(self.step, unit, frame))
        else:
            self.saved(await self.save())

    # ---- plans

    async def begin(self, plan: Plan) -> None:
        """Let the first plan take effect; see `stand`."""
        self.plan = plan
        await self.stand(plan, again=False)

    async def stand(self, plan: Plan, *, again: bool = True) -> None:
        """Let a plan take effect: stages are built, and training goes on from the last commit.

        Raises:
            CoterieError: A worker failed, left or fell silent meanwhile.
        """
        start_s = self._clock.now()
        plan = msgspec.structs.replace(plan, version=self.next_version)
        self._version = plan.version
        stages = {stage.worker: frozenset(range(stage.first_unit, stage.stop_unit)) for stage in plan.stages}
        self._members.go_on_without(stages, plan.version)
        self._replicas.restart()
        # Whoever is assigned a stage keeps what the stage has in common with the last one, and no more.
        held = {worker: self._held.get(worker, frozenset()) & units for worker, units in stages.items()}
        self._held |= held
        self._every = self._replicate_every(plan)
        if again:
            await self._tell_spares(plan.version, stages, "the plan has no layers for it")
        ready = await self._session.hand_out(plan, self._state, held=held, replicate_every=self._every)
        self._held |= stages
        if again:
            self._books.planned(plan)
            self.crew.planned()
        self._books.stages_stand(ready)
        self._begin(plan)
        self.stand_s = self._clock.now() - start_s

    def _begin(self, plan: Plan) -> None:
        self.plan = plan
        self.steps_of_plan = 0
        trainer = Trainer(self._members, plan, self._feeder, self._step_done, self.step)
        trainer.on_replica = self._replicas.put
        trainer.stop_requested = self.stop_requested
        self.trainer = trainer
        self._session.pausing.steer(trainer, self._members.wake, on_rested=self._books.training_begins)

    def _replicate_every(self, plan: Plan) -> int:
        free_bytes = memory_budget(None, device_type="cpu").bytes
        wanted = self._job.recipe.cluster.replicate_every
        return replicate_every(plan, self.unit_bytes, wanted=wanted, free_bytes=free_bytes)

    async def _tell_spares(self, version: int, staged: Collection[WorkerId], reason: str) -> None:
        spares = [member for worker, member in self._members.by_id.items() if worker not in staged]
        told = (member.send(StandBy(plan_version=version, reason=reason), plan_version=version) for member in spares)
        await asyncio.gather(*told, return_exceptions=True)  # one that is gone is noticed by its reader

    @property
    def next_version(self) -> int:
        """Of the next plan that takes effect."""
        return self._version + 1

    @property
    def usable(self) -> frozenset[WorkerId]:
        """Workers that a plan may use."""
        return (self.crew.workers & self._members.by_id.keys()) - self.departures.workers

    async def make_plan(self, workers: Collection[WorkerId]) -> Plan:
        """The best plan for some workers, as they are now.

        Raises:
            DoesNotFitError: They cannot hold the model.
            RecipeError: There are too few.
        """
        if not workers:
            raise DoesNotFitError("no worker is left")
        owners = self._members.owner_workers
        request = next_request(self._job, self.crew.cluster(workers), self.plan, owner_workers=owners)
        return await asyncio.to_thread(make_plan, request)

    # ---- losses

    def losses(self, error: CoterieError) -> list[Loss]:
        """What was lost when `error` was raised.

        Raises:
            CoterieError: It is no loss that a run can bear.
        """
        losses = self._members.take_losses()
        fatal = next((loss.error for loss in losses if isinstance(loss.error, FATAL)), None)
        if fatal is not None:
            raise fatal
        is_loss = isinstance(error, WorkerLostError) or any(loss.error is error for loss in losses)
        if not losses or not is_loss:
            raise error
        return losses

    async def recover(self, losses: list[Loss]) -> None:
        """Go on without the stages that are lost; more may be lost meanwhile.

        Raises:
            CoterieError: Nobody is left, or those that are cannot hold the model, and nobody came in time.
        """
        while True:
            for loss in losses:
                self._take_loss(loss)
            try:
                await self.stand(await self._plan_anew(losses[-1]))
            except CoterieError as error:
                losses = self.losses(error)
            else:
                return

    def _take_loss(self, loss: Loss) -> None:
        worker, name = loss.member.worker, loss.member.hello.name
        done = self.step
        self._held.pop(worker, None)
        if not loss.stays:
            self.crew.forget(worker)
            self.departures.forget(worker)
            self.note_membership(loss.member, "lost", loss.reason)
        elif isinstance(loss.error, OutOfMemoryError) and worker in self.crew.workers:
            self.crew.limit(worker, round(MEMORY_LEFT * self.crew.device(worker).memory_bytes))
        self._observer.record(
            FaultRecord(slug=loss.error.slug, message=f"{name}: {loss.reason}", worker=worker, step=done)
        )
        self._pending.append((loss, done, self.rewind()))

    def rewind(self) -> int:
        """Go back to the last commit; how many steps are done again for that."""
        again = self._books.rewind(self.committed)
        self.step = self.committed
        return again

    async def _plan_anew(self, loss: Loss) -> Plan:
        """A plan over those that are left, as soon as there is one."""
        deadline_s: float | None = None
        while True:
            self._changed.clear()
            try:
                return await self.make_plan(self.usable)
            except (DoesNotFitError, RecipeError) as error:
                lacking = error
            self._stop_if_asked()
            if deadline_s is None:
                deadline_s = self._clock.now() + await self._wait_for_somebody(lacking)
            left_s = deadline_s - self._clock.now()
            if left_s <= 0:
                raise self._cannot_go_on(loss, lacking)
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                raise self._cannot_go_on(loss, lacking) from None

    async def _wait_for_somebody(self, lacking: CoterieError) -> float:
        """For how many seconds; those that are left are told to stand by."""
        cluster = self._job.recipe.cluster
        self._version += 1
        self._members.go_on_without((), self._version)
        await self._tell_spares(self._version, (), "too few devices are left")
        if cluster.all_local:  # nobody starts the lost one again
            await asyncio.sleep(NEWS_S)
            return 0.0
        self._observer.notice(
            f"training cannot go on with the devices that are left, and waits {cluster.rejoin_s:.0f} s for one to "
            f"join: {lacking.message}"
        )
        return cluster.rejoin_s

    def _cannot_go_on(self, loss: Loss, lacking: CoterieError) -> CoterieError:
        """The loss itself, with what whoever started the worker knows of it, and why it cannot be borne."""
        known = self._session.deaths.get(loss.member.hello.name, loss.error)
        error = type(known)(f"{known.message}; {lacking.message}", hint=known.hint)
        if not isinstance(error, WorkerLostError):
            error.hint = known.hint or lacking.hint
        return error

    def _stop_if_asked(self) -> None:
        if self.stop_requested:
            raise InterruptedRunError(
                f"the run was stopped after step {self.step} of {self._job.total_steps}, while it waited for a device",
                hint="continue with --resume",
            )

    def _spare_left(self, member: Member, error: CoterieError) -> None:
        self._held.pop(member.worker, None)
        self.crew.forget(member.worker)
        self.departures.forget(member.worker)
        self.note_membership(member, "left", error.message)
        self.look_again()

    def stop(self) -> None:
        """The user wants to stop, with a checkpoint."""
        self.stop_requested = self.trainer.stop_requested = True
        self.look_again()
        self._members.wake()

    def look_again(self) -> None:
        """Whoever waits for devices sees whether there is a plan now."""
        self._changed.set()

    # ---- changes that can wait for the end of a step

    @property
    def is_flushing(self) -> bool:
        """Whether the pipeline is empty after every step."""
        return self.plan.schedule in ("flush", "gpipe")

    def break_off(self) -> None:
        """Something cannot wait: stop where no step is under way, or at once where that is too long to wait for."""
        if self.is_flushing or not self._every:
            self.trainer.break_requested = True
        else:
            self.trainer.break_off = True
        self._members.wake()

    async def move(self, plan: Plan) -> None:
        """Another plan takes effect, with nothing lost: what is done is committed first where no step is under way.

        Raises:
            CoterieError: A worker failed, left or fell silent meanwhile.
        """
        if self.trainer.break_off:
            self.rewind()
        else:
            await self._commit_now()
        await self.stand(plan)

    async def release_due(self) -> None:
        """Give the layers of those that leave to others, then let them go."""
        due = self.departures.due
        names = ", ".join(departure.device_name for departure in due)
        staged = {stage.worker for stage in self.plan.stages}
        if staged & self.departures.workers:
            try:
                plan = await self.make_plan(self.usable)
            except (DoesNotFitError, RecipeError) as error:
                self.departures.refuse()
                self._observer.notice(f"{names} cannot be spared: {error.message}")
                return
            moved = moves(self.plan, plan)
            sent = sum(self.unit_bytes[move.unit].frozen_bytes for move in moved)
            sent += sum(unit.trained_bytes for unit in self.unit_bytes)
            await self.move(plan)
            self._books.took(
                RebalanceRecord(
                    cause=due[0].cause,
                    reason="; ".join(f"{departure.device_name}: {departure.reason}" for departure in due),
                    step=self.step,
                    worth=True,
                    gain_s=0.0,
                    cost_s=self.stand_s,
                    moved_units=len(moved),
                    moved_bytes=sent,
                    plan_version=self.plan.version,
                )
            )
        for departure in due:
            await self._release(departure.worker, departure.reason)

    async def _release(self, worker: WorkerId, reason: str) -> None:
        member = self._members.by_id.get(worker)
        self.departures.forget(worker)
        self.crew.forget(worker)
        self._held.pop(worker, None)
        if member is not None:
            self.note_membership(member, "left", reason)
            await self._members.release(member, Stop(reason=reason))

    # ---- what is written down

    def note_membership(self, member: Member, change: MembershipChange, reason: str = "") -> None:
        """A device came or went."""
        self._books.took(
            MembershipRecord(
                worker=member.worker, device_name=member.hello.name, change=change, step=self.step, reason=reason
            )
        )

    def _step_done(self, step: int, entry: StepEntry) -> None:
        self.step = step + 1
        self.steps_of_plan += 1
        self._books.step(step, entry)
        self.went_on()
        self.on_step(step, entry)

    def went_on(self) -> None:
        """Training goes on after losses, or all that is left to do after it: write down how long that took."""
        pending, self._pending = self._pending, []
        for loss, done, again in pending:
            self._books.took(
                RecoveryRecord(
                    worker=loss.member.worker,
                    device_name=loss.member.hello.name,
                    reason=loss.reason,
                    step=done,
                    first_step=done - again,
                    replayed_steps=again,
                    noticed_s=loss.silent_s,
                    recovered_s=self._clock.now() - loss.at_s,
                    plan_version=self.plan.version,
                )
            )
