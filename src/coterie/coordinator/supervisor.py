"""Keeps a run on its feet: makes the next plan when a worker is lost, and when one leaves."""

import asyncio

from coterie.checkpoint.trained_state import TrainedState
from coterie.cluster.messages import Stop
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.losses import lost_meanwhile, take_losses
from coterie.coordinator.member import Loss, Member
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.session import Session
from coterie.coordinator.stages import Stages
from coterie.errors import (
    CoterieError,
    DoesNotFitError,
    InterruptedRunError,
    OutOfMemoryError,
    RecipeError,
    StorageError,
    WorkerLostError,
)
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.metrics.fault_records import MembershipChange, MembershipRecord, RebalanceRecord, RecoveryRecord
from coterie.metrics.records import FaultRecord
from coterie.planner.plan import Plan
from coterie.planner.rebalance import moves
from coterie.profiles.cluster_profile import ClusterProfile

log = get_logger(__name__)

MEMORY_LEFT = 0.9
"""Of a device's limit, for the next plan, when memory ran out under the last one."""

NEWS_S = 0.5
"""How long a run that cannot go on waits for whoever knows how the last worker's process ended."""


class Supervisor(Stages):
    """Goes on without stages that are lost, and gives the layers of devices that leave to others."""

    def __init__(  # noqa: PLR0913 - see `Stages`
        self,
        job: Job,
        session: Session,
        observer: RunObserver,
        *,
        books: Bookkeeper,
        feeder: TrainingFeeder,
        cluster: ClusterProfile,
        plan: Plan,
        first_step: int,
        state: TrainedState | None,
    ) -> None:
        super().__init__(
            job,
            session,
            books=books,
            feeder=feeder,
            cluster=cluster,
            plan=plan,
            first_step=first_step,
            state=state,
        )
        self._observer = observer
        self._pending: list[tuple[Loss, int, int, float]] = []
        self._changed = asyncio.Event()
        self._members.on_left = self._spare_left
        self.on_step.append(lambda _step, _entry: self.went_on())

    def stop(self) -> None:
        """See `Stages.stop`."""
        super().stop()
        self.look_again()

    # ---- losses

    def losses(self, error: CoterieError) -> list[Loss]:
        """What was lost when `error` was raised.

        Raises:
            CoterieError: It is no loss that a run can bear.
        """
        return take_losses(self._members, error)

    async def recover(self, losses: list[Loss]) -> None:
        """Go on without the stages that are lost; more may be lost meanwhile.

        Raises:
            CoterieError: Nobody is left, or those that are cannot hold the model, and nobody came in time.
        """
        last = losses[-1]
        self._session.pausing.is_disturbed()
        while True:
            for last in losses:
                self._take_loss(last)
            plan = await self._plan_anew(last)
            losses = lost_meanwhile(self._members)
            if losses:
                continue
            try:
                await self.stand(plan)
            except (DoesNotFitError, RecipeError):
                losses = self._members.take_losses()  # a spare has gone meanwhile: wait for another one
            except CoterieError as error:
                losses = self.losses(error)
            else:
                return

    def _take_loss(self, loss: Loss) -> None:
        worker, done = loss.member.worker, self.step
        self.holders.forget(worker)
        departure = self.departures.of(worker)
        if departure is not None and not loss.stays:  # gone for that reason, whatever it still said
            loss.reason, loss.has_left = f"{departure.cause}: {departure.reason}", True
        if not loss.stays:
            if self._members.by_id.get(worker) in (None, loss.member):  # else it is back, and measured anew
                self.crew.forget(worker)
            self.departures.forget(worker)
            self.note_membership(loss.member, "left" if loss.has_left else "lost", loss.reason)
        elif isinstance(loss.error, OutOfMemoryError) and worker in self.crew.workers:
            # What was planned did not fit, whatever the limit was said to be.
            planned = next((stage.memory.total for stage in self.plan.stages if stage.worker == worker), 0)
            limit_bytes = self.crew.device(worker).memory_bytes
            self.crew.limit(worker, round(MEMORY_LEFT * min(limit_bytes, planned or limit_bytes)))
        if not loss.has_left:
            self._observer.record(FaultRecord(slug=loss.error.slug, message=loss.reason, worker=worker, step=done))
        self._pending.append((loss, done, self.rewind(), self._session.pausing.rested_s))

    async def _plan_anew(self, loss: Loss) -> Plan:
        """A plan over those that are left, as soon as there is one."""
        deadline_s: float | None = None
        while True:
            self._changed.clear()
            try:
                return await self.plan_now()
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
        self.holders.forget(member.worker)
        self.crew.forget(member.worker)
        self.departures.forget(member.worker)
        self.note_membership(member, "left", error.message)
        self.look_again()

    def look_again(self) -> None:
        """Whoever waits for devices sees whether there is a plan now."""
        self._changed.set()

    async def release_due(self) -> None:
        """Give the layers of those that leave to others, then let them go."""
        due = self.departures.due
        staged = {stage.worker for stage in self.plan.stages}
        if staged & self.departures.workers:
            try:
                plan = await self.make_plan(self.usable)
            except (DoesNotFitError, RecipeError) as error:
                self.keep_those_due(error)
                return
            moved = moves(self.plan, plan)
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
                    moved_bytes=self.sent_bytes,
                    plan_version=self.plan.version,
                )
            )
        for departure in due:
            await self._release(departure.worker, departure.reason)

    def keep_those_due(self, error: CoterieError) -> None:
        """See `Stages.keep_those_due`."""
        names = ", ".join(departure.device_name for departure in self.departures.due)
        super().keep_those_due(error)
        self._observer.notice(f"{names} cannot be spared: {error.message}")

    async def _release(self, worker: WorkerId, reason: str) -> None:
        member = self._members.by_id.get(worker)
        self.departures.forget(worker)
        self.crew.forget(worker)
        self.holders.forget(worker)
        if member is not None:
            self.note_membership(member, "left", reason)
            await self._members.release(member, Stop(reason=reason, goes_on=True))

    # ---- what is written down

    def note_membership(self, member: Member, change: MembershipChange, reason: str = "") -> None:
        """A device came or went."""
        record = MembershipRecord(
            worker=member.worker, device_name=member.hello.name, change=change, step=self.step, reason=reason
        )
        try:
            self._books.took(record)
        except StorageError as error:  # whoever reads from the workers, and tells of this, is not to end by it
            self._members.post(error)

    def went_on(self) -> None:
        """Training goes on after losses, or all that is left to do after it: write down how long that took."""
        pending, self._pending = self._pending, []
        for loss, done, again, rested_s in pending:
            paused_s = self._session.pausing.rested_s - rested_s
            self._books.took(
                RecoveryRecord(
                    worker=loss.member.worker,
                    device_name=loss.member.hello.name,
                    reason=loss.reason,
                    step=done,
                    first_step=done - again,
                    replayed_steps=again,
                    is_gone=not loss.stays,
                    has_left=loss.has_left,
                    noticed_s=loss.silent_s,
                    recovered_s=max(self._clock.now() - loss.at_s - paused_s, 0.0),
                    plan_version=self.plan.version,
                    sent_bytes=self.sent_bytes,
                    kept_bytes=self.kept_bytes,
                )
            )
