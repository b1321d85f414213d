"""Notices what calls for another plan while training goes on, weighs it in the background, and has it take effect."""

import asyncio
from collections.abc import Awaitable, Collection

import msgspec

from coterie.clock import Clock
from coterie.cluster.energy import BatterySample, EnergyPolicy, should_hand_over
from coterie.cluster.fault_messages import Leaving, MemoryLow
from coterie.coordinator.bookkeeping import Bookkeeper
from coterie.coordinator.departures import Departure
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.ledger import StepEntry
from coterie.coordinator.member import Member
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.planning import next_request
from coterie.coordinator.replication import USUAL_BYTES_PER_S
from coterie.coordinator.session import Session
from coterie.coordinator.supervisor import Supervisor
from coterie.errors import CoterieError, DoesNotFitError, RecipeError
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.metrics.fault_records import RebalanceRecord
from coterie.planner import make_plan
from coterie.planner.capacity import StageTimes, drifted, judged, observe
from coterie.planner.decide import repredicted
from coterie.planner.plan import Plan
from coterie.planner.rebalance import Rebalance, weigh
from coterie.planner.request import PlanRequest
from coterie.profiles.cluster_profile import plannable_bytes

log = get_logger(__name__)


class Watch:
    """What a run learns of its devices while it trains: who comes, who wants to leave, who has become slower."""

    def __init__(
        self,
        job: Job,
        session: Session,
        observer: RunObserver,
        *,
        books: Bookkeeper,
        feeder: TrainingFeeder,
        supervisor: Supervisor,
    ) -> None:
        self._job = job
        self._session = session
        self._clock: Clock = session.clock
        self._observer = observer
        self._books = books
        self._feeder = feeder
        self._supervisor = supervisor
        self._tasks: set[asyncio.Task[None]] = set()
        self._weighing: asyncio.Task[None] | None = None
        self._wanted: tuple[Plan, Rebalance] | None = None
        self._short: dict[WorkerId, str] = {}
        self._again = ""
        """Why another plan is to be looked for after the next step, since it could not be when that was noticed."""
        measured = (member for worker, member in session.members.by_id.items() if worker in supervisor.crew.workers)
        self._names = {member.hello.name for member in measured}
        session.members.on_joined = self._joined
        session.members.on_wish = self._wish
        session.members.on_heartbeat = self._heartbeat
        supervisor.on_step.append(self._step)
        for member in session.members.with_role("device"):
            if member.worker not in supervisor.crew.workers:  # it came while the others were measured
                self._joined(member)

    async def close(self) -> None:
        """Weigh and measure no more."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what is noticed

    def _joined(self, member: Member) -> None:
        name = member.hello.name
        self._supervisor.note_membership(member, "returned" if name in self._names else "joined")
        self._names.add(name)
        self._supervisor.crew.forget(member.worker)  # of a device that is back, what is known is old
        self._spawn(self._measure(member))

    async def _measure(self, member: Member) -> None:
        found = await self._session.measure_one(member)
        if member.is_gone:
            return
        self._supervisor.crew.add(found)
        self._supervisor.departures.somebody_joined()
        self._supervisor.look_again()
        self._consider("joined")

    def _wish(self, member: Member, wish: Leaving | MemoryLow) -> None:
        if isinstance(wish, Leaving):
            self._depart(member, "leaving", wish.reason)
            return
        worker = member.worker
        if worker not in self._supervisor.crew.workers:
            return
        self._supervisor.crew.limit(worker, plannable_bytes(wish.limit_bytes))
        self._observer.notice(f"{member.hello.name}: {wish.reason}")
        if self._is_short(worker):
            self._short[worker] = wish.reason
            self._supervisor.break_off()
        else:
            self._short.pop(worker, None)
            self._consider("memory")

    def _heartbeat(self, member: Member) -> None:
        self._books.heartbeat(member)
        vitals = member.vitals
        if vitals is None or vitals.battery is None:
            return
        sample = BatterySample(at_s=self._clock.now(), charge=vitals.battery, on_power=vitals.on_power)
        history = self._supervisor.crew.note_battery(member.worker, sample)
        hand_over = should_hand_over(
            history,
            EnergyPolicy(reserve=vitals.reserve, only_on_power=vitals.only_on_power),
            remaining_s=self._remaining_steps * (self._books.step_s or self._plan.predicted_step_s),
            move_s=self._supervisor.stand_s,
            handed_over=member.worker in self._supervisor.departures.workers,
        )
        if hand_over is not None:
            self._depart(member, "battery", hand_over.reason)

    def _depart(self, member: Member, cause: str, reason: str) -> None:
        departure = Departure(worker=member.worker, device_name=member.hello.name, cause=cause, reason=reason)
        if self._supervisor.departures.add(departure):
            self._observer.notice(f"{member.hello.name} is to be released: {reason}")
            self._supervisor.break_off()

    def _step(self, step: int, entry: StepEntry) -> None:
        crew, plan = self._supervisor.crew, self._plan
        times = tuple(
            StageTimes(worker=worker, seconds=(done.forward_s + done.backward_s) / plan.micro_batches)
            for worker, done in entry.done.items()
        )
        crew.capacities = observe(crew.capacities, plan, times, load=self._feeder.load(step))
        if self._again:
            self._consider(self._again)
        elif drifted(crew.capacities, plan, steps_since_plan=self._supervisor.steps_of_plan):
            self._consider("drift")

    # ---- what is weighed

    @property
    def _plan(self) -> Plan:
        return self._supervisor.plan

    @property
    def _remaining_steps(self) -> int:
        return self._job.total_steps - self._supervisor.step

    def _consider(self, cause: str) -> None:
        """Look for a better plan, unless that is done already; cuts of the user's own are left alone."""
        recipe = self._job.recipe
        if not recipe.cluster.rebalance or recipe.plan.cuts is not None:
            return
        if self._weighing is None and self._wanted is None and self._supervisor.stands:
            self._again = ""
            self._weighing = self._spawn(self._weigh(cause))
        elif cause != "drift":  # a drift is noticed again
            self._again = cause

    async def _weigh(self, cause: str) -> None:
        supervisor, current = self._supervisor, self._plan
        try:
            workers = supervisor.usable
            request = self._request(workers, current)
            supervisor.crew.capacities = judged(supervisor.crew.capacities)
            if not workers.issuperset(stage.worker for stage in current.stages):
                return  # one of its devices is about to leave, or gone: the next plan is made for that reason
            now, candidate = await asyncio.to_thread(_both, current, request)
        except (DoesNotFitError, RecipeError) as error:
            log.info("there is no other plan (%s): %s", cause, error.message)
            return
        finally:
            self._weighing = None
        if self._plan is not current:
            if cause != "drift":
                self._again = cause
            return
        slowest = supervisor.crew.slowest_link(workers)
        found = weigh(
            now,
            candidate,
            remaining_steps=self._remaining_steps,
            moved_bytes_per_s=USUAL_BYTES_PER_S if slowest is None else slowest.bytes_per_s,
            unit_bytes=supervisor.unit_bytes,
            rebuild_s=supervisor.stand_s,
        )
        self._record(cause, found)
        if found.worth:
            self._wanted = (current, found)
            supervisor.trainer.break_requested = True

    def _request(self, workers: Collection[WorkerId], current: Plan) -> PlanRequest:
        owners = self._session.members.owner_workers
        return next_request(self._job, self._supervisor.crew.cluster(workers), current, owner_workers=owners)

    def _record(self, cause: str, found: Rebalance) -> None:
        self._books.took(
            RebalanceRecord(
                cause=cause,
                reason=found.reason,
                step=self._supervisor.step,
                worth=found.worth,
                gain_s=found.gain_s,
                cost_s=found.cost_s,
                moved_units=len(found.moves),
                moved_bytes=found.moved_bytes,
                plan_version=self._supervisor.next_version if found.worth else self._plan.version,
            )
        )

    # ---- what takes effect

    @property
    def is_due(self) -> bool:
        """Whether `settle` has anything to do."""
        supervisor = self._supervisor
        return bool(supervisor.departures.due or self._short or self._wanted or supervisor.is_broken_off)

    async def settle(self) -> None:
        """With no step under way, or all of them given up: let the changes take effect.

        Raises:
            CoterieError: A worker failed, left or fell silent meanwhile.
        """
        supervisor = self._supervisor
        if supervisor.departures.due:
            await supervisor.release_due()
        if self._short:
            await self._fit()
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted[0] is self._plan:
            await supervisor.move(wanted[1].plan)
        supervisor.trainer.break_requested = False
        if supervisor.trainer.break_off:  # nothing could be changed: what was given up is done again, as it was
            await supervisor.move(self._plan)

    async def _fit(self) -> None:
        """Devices have less memory than their stages need: another plan, if any fits."""
        supervisor = self._supervisor
        short = [reason for worker, reason in self._short.items() if self._is_short(worker)]
        self._short = {}
        if not short:
            return
        try:
            plan = await supervisor.make_plan(supervisor.usable)
        except (DoesNotFitError, RecipeError) as error:
            self._observer.notice(f"memory is short ({'; '.join(short)}), and no plan fits: {error.message}")
            return
        workers = [stage.worker for stage in self._plan.stages]
        request = self._request(workers, self._plan)
        found = weigh(
            repredicted(self._plan, request),
            plan,
            remaining_steps=self._remaining_steps,
            moved_bytes_per_s=USUAL_BYTES_PER_S,
            unit_bytes=supervisor.unit_bytes,
            rebuild_s=supervisor.stand_s,
        )
        reason = f"{'; '.join(short)}; {found.reason}"
        self._record("memory", msgspec.structs.replace(found, worth=True, reason=reason))
        await supervisor.move(plan)

    def _is_short(self, worker: WorkerId) -> bool:
        """Whether it has a stage that needs more memory than it may use now."""
        return worker in self._supervisor.crew.workers and any(
            stage.worker == worker and stage.memory.total > self._supervisor.crew.device(worker).memory_bytes
            for stage in self._plan.stages
        )

    def _spawn(self, work: Awaitable[None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, CoterieError):  # a newcomer that left again while it was measured
            log.info("nothing came of a change: %s", error.message)
        else:
            bug = CoterieError(f"{type(error).__name__}: {error}", hint="this is a bug: please report it")
            self._session.members.post(bug)


def _both(current: Plan, request: PlanRequest) -> tuple[Plan, Plan]:
    return repredicted(current, request), make_plan(request)
