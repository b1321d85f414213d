"""One coordinator and the workers around it: the open port, who joins, the plan, stages handed out, the farewell."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from coterie.checkpoint.trained_state import TrainedState
from coterie.clock import Clock, SystemClock
from coterie.cluster.fault_messages import CopyTerms
from coterie.cluster.messages import Assign, ProfileRequest, StageReady, Stop
from coterie.cluster.side_messages import SideStage
from coterie.coordinator.acquaintances import Acquaintances
from coterie.coordinator.control import front_page
from coterie.coordinator.desk import RunDesk
from coterie.coordinator.device_list import DeviceList
from coterie.coordinator.door import Door
from coterie.coordinator.gathering import Gathering, measure_newcomer
from coterie.coordinator.holders import HandedOut, Handover
from coterie.coordinator.job import Job
from coterie.coordinator.member import Member
from coterie.coordinator.members import Members
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.pairing import answer_pairings
from coterie.coordinator.pausing import Pause
from coterie.coordinator.planning import make_job_plan
from coterie.coordinator.shards import ShardSource, parts_due, send_stage
from coterie.coordinator.side_spec import backbone_spec
from coterie.coordinator.stopping import StopRequests
from coterie.errors import (
    CoterieError,
    DoesNotFitError,
    InterruptedRunError,
    NetworkError,
    OutOfMemoryError,
    ProtocolError,
    WorkerLostError,
)
from coterie.ids import WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.roles import WorkerRole
from coterie.metrics.records import FaultRecord
from coterie.planner.plan import Plan, StageAssignment
from coterie.profiles.cluster_profile import ClusterProfile
from coterie.transport.addresses import is_loopback, own_addresses
from coterie.transport.discovery import announced
from coterie.transport.join_link import JoinLink
from coterie.transport.listening import check_port
from coterie.transport.server import FrameServer
from coterie.units import counted

_T = TypeVar("_T")


class Session:
    """What training, forward runs and plans have in common. `stop` may be asked to end it from outside."""

    def __init__(
        self, job: Job, observer: RunObserver, *, clock: Clock | None = None, door: Door | None = None
    ) -> None:
        self._job = job
        self._observer = observer
        self._cluster = job.recipe.cluster
        self._goes_on = not job.forward_only and job.recipe.train.mode != "side"
        """Whether without a worker that is lost."""
        self.clock = clock or SystemClock()
        self.door = door or Door(clock=self.clock)
        self.members = Members(
            job.run,
            self.door,
            self.clock,
            heartbeat_s=self._cluster.heartbeat_s,
            silence_limit_s=self._cluster.heartbeat_timeout_s,
            rejoin_s=0.0 if job.forward_only else self._cluster.rejoin_s,
            seats=_seats(job),
        )
        self._wanted = self._cluster.workers_expected
        self.members.on_left = lambda member, error: observer.notice(
            f"{member.hello.name} left before the run began, its place is free again: {error.message}"
        )
        self.members.on_met = self._met
        self._app = front_page()
        answer_pairings(self._app, self.door)
        self._announcing = contextlib.AsyncExitStack()
        self._server = FrameServer(self.members.admit, app=self._app, identity=self.door.certificate)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stop = StopRequests()
        self.pausing = Pause(self._rests, clock=self.clock)
        self._peer_token = secrets.token_urlsafe(16)
        self.deaths: dict[str, CoterieError] = {}
        """By name how processes of workers ended, in a run that goes on without them."""
        self.handed_out: dict[WorkerId, HandedOut] = {}
        """By worker what the last plan that was handed out took."""
        self.desk: RunDesk | None = None
        self._acquaintances = Acquaintances(DeviceList(), self.door.is_own, self.clock)

    def open_desk(self, desk: RunDesk) -> None:
        """Let the holder of the desk's token see and control the run; before `run`."""
        desk.attach(self._app, self.members, self.stop, self.pausing)
        self.desk = desk

    def worker_ended(self, name: str, error: CoterieError) -> None:
        """Told from another thread: the process of a worker has ended. Where the run can go on, it does."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # see `end_with`
                loop.call_soon_threadsafe(self._take_death, name, error)

    def _take_death(self, name: str, error: CoterieError) -> None:
        if not self.members.survives:
            self.members.post(error)
            return
        self._observer.notice(error.message)
        self.deaths[name] = error
        self.members.died(name, error)

    def end_with(self, error: CoterieError) -> None:
        """End it from another thread: something outside has failed, such as a local worker's process."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: it is over
                loop.call_soon_threadsafe(self.members.post, error)

    async def run(self, work: Callable[[], Awaitable[_T]], *, advice: Callable[[], str] = lambda: "") -> _T:
        """Open the port, do the work, and tell every worker goodbye, whatever happened.

        `advice()` says how to go on after a stop, or when workers are lost or short of memory.

        Raises:
            InterruptedRunError: A stop was requested.
            CoterieError: What ended the work.
        """
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        tasks = (
            asyncio.create_task(self.members.beat()),
            asyncio.create_task(self._acquaintances.keep_hearing(self._present)),
        )
        farewell = "finished"
        try:
            with self.stop.listening(task):
                await self._open_port()
                if self.desk is not None:
                    self.desk.open(self._cluster.listen_host, self._server.port, self._server.fingerprint)
                return await work()
        except CoterieError as error:
            farewell = error.message
            if isinstance(error, WorkerLostError | OutOfMemoryError | DoesNotFitError):
                error.hint = "; ".join(filter(None, (error.hint, advice())))
            self._observer.record(FaultRecord(slug=error.slug, message=error.message))
            raise
        except asyncio.CancelledError:
            if not self.stop.requested:
                raise
            task.uncancel()
            farewell = "stopped"
            raise InterruptedRunError("the run was stopped", hint=advice()) from None
        finally:
            self._loop = None
            for background in tasks:
                background.cancel()
            self._acquaintances.heard(self._present())
            if self.desk is not None:
                self.desk.close()
            await self._announcing.aclose()
            await self.members.dismiss(Stop(reason=farewell))
            await self._server.close()

    async def _open_port(self) -> None:
        """The port that the recipe says, else the one that workers of a killed coordinator still dial, else any."""
        host, port = self._cluster.listen_host, self._cluster.port
        if not port and self.door.port:
            try:
                check_port(host, self.door.port)
                port = self.door.port
            except NetworkError as error:
                self._observer.notice(f"{error.message}: another port is opened, and workers need the new join link")
        await self._server.start(host, port)
        self.door.opened(self._server.port)

    def own_link(self, join_link: str) -> str:
        """The join link for workers that are started beside the coordinator: one that nobody else has."""
        token = self.door.issue(uses=2 * self._cluster.workers_expected, own=True)
        return msgspec.structs.replace(JoinLink.from_text(join_link), token=token).to_text()

    async def gather(self) -> None:
        """Publish the join link and wait for the workers."""
        wanted = self._wanted
        local = self._cluster.listen_host in ("127.0.0.1", "localhost", "::1")
        join = JoinLink(
            hosts=("127.0.0.1",) if local else own_addresses(),
            port=self._server.port,
            fingerprint=self._server.fingerprint,
            token=self.door.issue(uses=self._cluster.token_uses or 2 * wanted, minutes=self._cluster.token_minutes),
        )
        self._observer.joinable(join.to_text())
        if self._cluster.announce:
            await self._announce(join)
        self._observer.notice(f"waiting for {wanted} worker{'s' if wanted > 1 else ''}")
        await self.members.wait_for(wanted, self._cluster.join_timeout_s)

    async def gather_again(self, *, server_alone: bool) -> None:
        """Wait for whoever was lost, and for all others: their links are cut, so that they begin as in a resumed run.

        Raises:
            JoinRefusedError: Somebody has not come within `cluster.rejoin_s`.
        """
        seats: dict[WorkerRole, int] = {"device": 0, "server": 1} if server_alone else _seats(self._job)
        self._wanted = sum(seats.values())
        self.members.begin_again(seats)
        await self.members.wait_for(self._wanted, self._cluster.rejoin_s)

    def _met(self, member: Member) -> None:
        """A worker is here before the run begins. The run's own need no word: nobody waits for their owners."""
        self._acquaintances.met([member])
        if not member.is_owner:
            wanted = counted(self._wanted, "worker")
            self._observer.notice(f"{member.hello.name} has joined, {len(self.members.by_id)} of {wanted}")

    def _present(self) -> tuple[Member, ...]:
        return tuple(self.members.by_id.values())

    def _rests(self, is_resting: bool) -> None:  # noqa: FBT001 - a callback's only argument
        self._observer.notice("paused: `coterie continue` goes on" if is_resting else "the pause is over")

    async def _announce(self, join: JoinLink) -> None:
        """Let workers in this network find the run until it ends; without a network they need the link."""
        interfaces = join.hosts if is_loopback(join.hosts[0]) else ()
        announcement = announced(self._job.run, join.port, join.fingerprint, join.hosts, interfaces=interfaces)
        try:
            await self._announcing.enter_async_context(announcement)
        except NetworkError as error:
            self._observer.notice(f"the run is not announced: {error.message}")
        else:
            self._observer.notice("announced in this network: `coterie worker` finds it, and asks for the token")

    async def measure(self) -> ClusterProfile:
        """Profiles of the devices that joined and of the links between them.

        One that is lost meanwhile is left out, and where too few are left, others are waited for.
        """
        if self._goes_on:
            self.members.go_on_without(self.members.by_id, plan_version=0)
            self.members.on_joined = self._met
        gathering = Gathering(self.members, self.profile_request(), self._observer, self._peer_token)
        wishes = self._job.recipe.plan
        least = max(wishes.min_workers, len(wishes.cuts or ()) + 1)
        cluster = await gathering.measure_enough(least, self._cluster, self.deaths)
        for notice in slow_in_bfloat16(cluster, self._job.spec):
            self._observer.notice(notice)
        for device in cluster.devices:
            self._acquaintances.measured(self.members.by_id[device.worker], device)
        return cluster

    async def measure_one(self, member: Member) -> ClusterProfile:
        """The same of a device that came in mid-run: itself, and its links to the others that are in."""
        self._acquaintances.met([member])
        cluster = await measure_newcomer(self.members, member, self.profile_request(), self._peer_token)
        self._acquaintances.measured(member, cluster.devices[0])
        return cluster

    def profile_request(self) -> ProfileRequest:
        """What each device is asked to measure."""
        job = self._job
        rows = max(job.recipe.train.batch_rows // 4, 1), max(job.recipe.train.batch_rows, 2)
        spec = backbone_spec(job.spec) if job.recipe.train.mode == "side" else job.spec
        return ProfileRequest(spec=spec, model=job.model_profile, rows=rows, again=self._cluster.measure_again)

    async def plan(self, *, micro_batches: int | None = None) -> tuple[Plan, str]:
        """Measure whoever joined, plan, and explain; `micro_batches` is set when a run is resumed.

        Raises:
            DoesNotFitError: No plan fits.
        """
        cluster = await self.measure()
        owners = self.members.owner_workers
        return await asyncio.to_thread(  # heartbeats go on
            make_job_plan, self._job, cluster, micro_batches=micro_batches, owner_workers=owners
        )

    async def hand_out(
        self,
        plan: Plan,
        state: TrainedState | None,
        *,
        side: SideStage | None = None,
        handover: Handover | None = None,
    ) -> dict[WorkerId, StageReady]:
        """Give each stage its assignment and weights, and wait until all are built: what each worker says then.

        Args:
            plan: Which stage of it whom.
            state: Where training goes on from; None: the model as it is.
            side: They are stages of a frozen backbone, which run forward only.
            handover: What workers have from the plan before, and what they keep for the next one.

        Raises:
            CoterieError: A worker failed, left or fell silent.
        """
        job = self._job
        spec = job.spec if side is None else backbone_spec(job.spec)
        source = ShardSource(spec, job.weights, state)
        tied = self._tied_peers(plan) if side is None else {}
        over = handover or Handover()
        self.handed_out = {}

        async def assign(stage: StageAssignment) -> None:
            if stage.worker not in self.members.by_id:
                raise WorkerLostError(f"{stage.device_name} has gone while stages were handed out")
            member = self.members.by_id[stage.worker]
            terms = over.terms.get(stage.worker, CopyTerms())
            asked = sorted(source.trained_units & over.trained.get(stage.worker, frozenset()))
            begins_with = [await asyncio.to_thread(source.trained_unit, unit) for unit in asked]
            units = range(stage.first_unit, stage.stop_unit)
            what = Assign(
                run=job.run,
                plan=plan,
                stage=stage.stage,
                spec=spec,
                optimizer=job.optimizer,
                task=job.task.name,
                gradient_below=side is None and any(job.anatomy.trainable[: stage.first_unit]),
                tied_peer=tied.get(stage.worker, WorkerId("")),
                resumed_step=state.step if state else 0,
                side=side,
                held_units=tuple(unit for unit in units if unit in over.frozen.get(stage.worker, ())),
                replicate_every=over.replicate_every,
                copies=msgspec.structs.replace(terms, begins_with=tuple(begins_with)),
            )
            await self._hand_to(member, what, source)

        tasks = [asyncio.ensure_future(assign(stage)) for stage in plan.stages]
        sending = asyncio.gather(*tasks)
        sending.add_done_callback(lambda _done: self.members.wake())
        try:
            ready = await self._stages_ready(plan, sending)
        finally:
            for task in tasks:  # where one has failed, the others would go on, and take what the next plan waits for
                task.cancel()
            await asyncio.gather(sending, *tasks, return_exceptions=True)
        if self.desk is not None:
            self.desk.links = {worker: message.link_to_next for worker, message in ready.items()}
        return ready

    async def _hand_to(self, member: Member, what: Assign, source: ShardSource) -> None:
        """Send one worker its stage: of the weights what it does not have."""
        plan = what.plan
        await member.send(what, plan_version=plan.version)
        kept = frozenset(copy.unit for copy in what.copies.begins_with)
        if kept:
            kept -= {*(await member.trained_wants(plan.version)).units}
        stage = plan.stages[what.stage]
        due = parts_due(range(stage.first_unit, stage.stop_unit), what.held_units, kept)
        sent_bytes = await send_stage(member, due, source, what.run, plan.version)
        self.handed_out[stage.worker] = HandedOut(sent_bytes=sent_bytes, trained=kept)

    async def _stages_ready(self, plan: Plan, sending: "asyncio.Future[list[None]]") -> dict[WorkerId, StageReady]:
        ready: dict[WorkerId, StageReady] = {}
        while len(ready) < len(plan.stages):
            if sending.done():
                sending.result()  # what went wrong, if anything did
            event = await self.members.next_event_or_wake()
            if event is None:
                continue
            if isinstance(event.message, StageReady):
                ready[event.member.worker] = event.message
            elif not self.members.survives:
                raise ProtocolError(f"{event.member.hello.name} sent {event.frame.header.kind} before its stage stood")
        return ready

    def _tied_peers(self, plan: Plan) -> dict[WorkerId, WorkerId]:
        """Who exchanges the gradient of a trained tied matrix with whom."""
        tied = self._job.anatomy.tied
        first, last = plan.stages[0].worker, plan.stages[-1].worker
        trained = tied is not None and any(tied.name in names for names in self._job.anatomy.trainable)
        return {first: last, last: first} if trained and first != last else {}


def slow_in_bfloat16(cluster: ClusterProfile, spec: ModelSpec) -> tuple[str, ...]:
    """What to say of devices on which computing in bfloat16, as the recipe asks, is slower than in float32."""
    if spec.compute_dtype != "bfloat16":
        return ()
    return tuple(
        f"{device.name} computes bfloat16 at {device.bfloat16_speed:.2f} times its float32 speed: "
        'compute_dtype = "float32" is faster there'
        for device in cluster.devices
        if device.bfloat16_speed < 1
    )


def _seats(job: Job) -> dict[WorkerRole, int]:
    """How many devices and servers take part."""
    servers = 1 if job.recipe.train.mode == "side" else 0
    return {"device": job.recipe.cluster.workers_expected - servers, "server": servers}
