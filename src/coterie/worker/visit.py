"""A worker's stay with a coordinator: from its hello until the run is over for it, or the link is lost."""

import asyncio
import contextlib

from coterie.cluster.fault_messages import Leaving
from coterie.cluster.message import Message
from coterie.cluster.messages import (
    CONTROL,
    WEIGHTS,
    Goodbye,
    Heartbeat,
    LinksMeasured,
    MeasureLinks,
    ProfileRequest,
    Stop,
    Welcome,
    control,
    unpack,
)
from coterie.errors import (
    CoterieError,
    NetworkError,
    OutOfMemoryError,
    ProtocolError,
    WorkerLostError,
)
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.logs import get_logger
from coterie.measure.budget import limit_accelerator_memory, memory_budget
from coterie.measure.process_memory import current_rss_bytes, limit_memory
from coterie.profiles.cluster_profile import RESERVE_PERCENT, LinkProfile
from coterie.transport.frame import Frame
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer
from coterie.transport.stream_link import StreamLink
from coterie.units import format_bytes, format_seconds
from coterie.worker.greeting import hello_of, welcome_in
from coterie.worker.last_words import explained, failed
from coterie.worker.outboxes import Outboxes
from coterie.worker.own_device import OwnDevice
from coterie.worker.peers import Peers
from coterie.worker.seat import COMPUTE_END_S, Seat
from coterie.worker.seating import NEWS_S, Seating
from coterie.worker.side_role import ServerRole
from coterie.worker.stall import StallWatch, stall_limit_s
from coterie.worker.watch import LOOK_S, DeviceWatch

log = get_logger(__name__)

AWAKE_S = 1.0
"""How long a link may be looked at, after a process has come to itself, before its silence means anything."""


class Visit:
    """One link to a coordinator, and what this worker does there.

    Args:
        device: What the worker computes with.
        peers: Its direct links to other workers.
        link: That to the coordinator, open.
        watch: Looks after the device.
    """

    def __init__(self, device: OwnDevice, peers: Peers, link: StreamLink, watch: DeviceWatch) -> None:
        self._settings = device.settings
        self._say = device.say
        self._device = device
        self._peers = peers
        self._link = link
        self._watch = watch
        self._stall = StallWatch(LOOK_S)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcome = Welcome(worker=WorkerId(""), run=RunId(""), heartbeat_s=2.0, silence_limit_s=30.0)
        self._seating = Seating(device, peers, link, send=self._send, fail=self._fail)
        self._lost: CoterieError | None = None
        self._outboxes = Outboxes(link, {})
        self._server: ServerRole | None = None
        if self._settings.role == "server":
            self._server = ServerRole(
                self._settings,
                self._say,
                self._outboxes.to(COORDINATOR),
                fail_from_thread=self._fail_from_thread,
                leave=self._leave,
            )

    async def run(self, join: JoinLink, server: FrameServer) -> CoterieError | None:
        """Join and work until the run is over, or the coordinator is lost: then this says why.

        Raises:
            CoterieError: Refused, or failed.
        """
        try:
            await self._greet(join, server)
            self._spawn(self._read_coordinator())
            self._spawn(self._beat())
            self._spawn(self._look_after())
            await self._ended
        except CoterieError as error:
            await self._report(failed(error))
            raise
        except asyncio.CancelledError:
            await self._report(Goodbye(reason="stopped by its owner"))
            raise
        finally:
            await self._close()
        return self._lost

    async def ask_to_leave(self, reason: str) -> bool:
        """Ask to be released, if the run can go on without this worker's stage; whether that is so. `Stop` answers."""
        if not self._seating.can_be_moved:
            return False
        with contextlib.suppress(CoterieError):
            await self._send(Leaving(reason=reason))
        return True

    @property
    def is_welcome(self) -> bool:
        """Whether the coordinator has let this worker in."""
        return bool(self._welcome.worker)

    @property
    def rejoin_s(self) -> float:
        """How long the coordinator wants this worker to try to come back; 0: not at all."""
        return self._welcome.rejoin_s

    def _limit_memory(self, limit_bytes: int) -> bool:
        device_type = self._settings.device_type
        return limit_memory(limit_bytes) if device_type == "cpu" else limit_accelerator_memory(device_type, limit_bytes)

    async def _greet(self, join: JoinLink, server: FrameServer) -> None:
        settings = self._settings
        budget = memory_budget(settings.memory_bytes, device_type=settings.device_type)
        if settings.enforce_memory and settings.memory_bytes and not self._limit_memory(settings.memory_bytes):
            self._say(
                f"the memory limit is planned with but not enforced: this system cannot, or the worker's own "
                f"{format_bytes(current_rss_bytes())} are more"
            )
        await self._send(hello_of(settings, join, server, budget.bytes, self._device.identity))
        welcome = welcome_in(await self._link.receive())
        # On disk before another word is said: the coordinator takes that word as a sign that the ticket came.
        self._device.identity.keep_ticket(join.fingerprint, welcome.ticket)
        self._welcome, self._seating.worker = welcome, welcome.worker
        self._say(f"joined run {welcome.run} as {welcome.worker} ({budget.why}; {RESERVE_PERCENT} % kept back)")

    async def _read_coordinator(self) -> None:
        try:
            while True:
                frame = await self._next_frame()
                if self._server is not None and await self._server.takes(frame, self._welcome.worker):
                    continue
                if 0 < frame.header.plan_version < self._seating.version:
                    log.info("a %s frame of plan %d was dropped", frame.header.kind, frame.header.plan_version)
                elif frame.header.kind == CONTROL:
                    await self._handle(unpack(frame.header.body), frame)
                elif frame.header.kind == WEIGHTS:
                    await self._seating.take_weights(frame)
                else:
                    self.take_data(frame)
        except NetworkError as error:
            self._coordinator_lost(error)

    def _coordinator_lost(self, error: NetworkError) -> None:
        """What a link that broke means: the stage is worth nothing any more, the worker may come back."""
        if self._ended.done():
            log.info("the coordinator has closed the link")  # it has said before that the run is over
        elif self._server is not None and self._server.is_alone:
            self._say("the coordinator has left")
        elif self.rejoin_s > 0:
            self._lost = error
            self._leave()
        else:
            self._fail(error)

    async def _next_frame(self) -> Frame:
        """The coordinator's next frame. Silence is a link on which no byte moves: large frames take their time."""
        limit_s = self._welcome.silence_limit_s
        while True:
            received = self._link.bytes_received
            try:
                async with asyncio.timeout(limit_s):
                    return await self._link.receive()
            except TimeoutError:
                if self._link.bytes_received == received:
                    # A process that was stopped finds its timers run out before it has looked at its sockets.
                    await asyncio.sleep(AWAKE_S)
                if self._link.bytes_received == received:
                    raise NetworkError(
                        f"the coordinator has been silent for {limit_s:.0f} s",
                        hint="check the network and the coordinator's machine",
                    ) from None

    async def _handle(self, message: object, frame: Frame) -> None:
        match message:
            case Heartbeat():
                pass
            case ProfileRequest():
                self._spawn(self._profile(message))
            case MeasureLinks():
                self._peers.expect(message.run, message.peer_token)
                self._spawn(self._measure_links(message))
            case Stop(reason=reason, goes_on=goes_on):
                what = "released, the run goes on without this device" if goes_on else "the run is over"
                self._say(f"{what}{f': {reason}' if reason else ''}")
                if isinstance(self._seating.trouble, OutOfMemoryError):
                    self._fail(self._seating.trouble)
                elif self._server is None or not self._server.is_alone:
                    self._leave()
                with contextlib.suppress(CoterieError):  # the coordinator may have closed the link already
                    await self._send(Goodbye(reason=reason))
            case _ if not await self._seating.handle(message, frame):
                raise ProtocolError(f"the coordinator sent {type(message).__name__}, which a worker has no use for now")

    async def _profile(self, request: ProfileRequest) -> None:
        self._say("measuring this device")
        await self._send(await asyncio.to_thread(self._device.measured, request, self._welcome.worker))

    async def _measure_links(self, request: MeasureLinks) -> None:
        links: list[LinkProfile] = []
        failures: list[str] = []
        for address in request.peers:
            try:
                if not self._settings.direct_links:
                    raise NetworkError("its owner allows no direct links")
                links.extend(await self._peers.dial(address, self._welcome.worker))
            except CoterieError as error:
                failures.append(f"{address.worker}: {error.message}")
                log.info("no direct link to %s: %s", address.worker, error.message)
        await self._send(LinksMeasured(links=tuple(links), failures=tuple(failures)))

    def take_data(self, frame: Frame) -> None:
        """Take a frame with tensors, from the coordinator or over a direct link."""
        if self._server is not None:
            self._server.take_data(frame)
        else:
            self._seating.take_data(frame)

    def peer_lost(self, worker: WorkerId, error: CoterieError) -> None:
        """A direct link has ended."""
        self._seating.peer_lost(worker, error)

    async def _beat(self) -> None:
        with contextlib.suppress(CoterieError):  # the link is gone: its reader says why, after what came before
            while True:
                await asyncio.sleep(self._welcome.heartbeat_s)
                await self._send(Heartbeat(rss_bytes=current_rss_bytes(), vitals=self._watch.vitals))

    async def _look_after(self) -> None:
        """Adapt what runs to the device's memory and to its owner; tell the coordinator what concerns it."""
        self._watch.joined()
        while True:
            running = self._seating.running
            self._look_for_stall(running)
            for message in self._watch.look(running, computes=self._seating.has_stage or self._server is not None):
                await self._send(message)
                if isinstance(message, Goodbye):
                    self._leave()
            if self._server is not None:
                self._server.set_speed(self._watch.speed)
            await asyncio.sleep(LOOK_S)

    def _look_for_stall(self, running: Seat | None) -> None:
        """End a worker whose compute thread does not come back: a thread cannot be stopped, a process can."""
        stalled_s = self._stall.look(None if running is None else running.block)
        if running is None:
            return
        stage = running.assign.plan.stages[running.assign.stage]
        if stalled_s > (limit_s := stall_limit_s(stage)):
            self._fail(
                WorkerLostError(
                    f"stage {stage.stage} has not come back from one micro-batch for {stalled_s:.0f} s (limit "
                    f"{limit_s:.0f} s, predicted {format_seconds(stage.forward_s + stage.backward_s)})",
                    hint="its memory may be swapped out, or a driver hang: look at the device, start the worker again",
                )
            )

    async def _send(self, message: Message, version: int = 0) -> None:
        await self._link.send(control(message, source=self._welcome.worker, plan_version=version))

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, NetworkError):
            log.info("an answer did not reach the coordinator: %s", error.message)  # its reader says why
        else:
            self._fail(explained(error))

    def _fail_from_thread(self, error: CoterieError) -> None:
        """A server's thread has ended."""
        is_link = isinstance(error, NetworkError | WorkerLostError)
        self._loop.call_soon_threadsafe(self._fail_later if is_link else self._fail, error)

    def _fail_later(self, error: CoterieError) -> None:
        """Fail unless the coordinator ends the run before."""
        self._loop.call_later(NEWS_S, self._fail, error)

    def _leave(self) -> None:
        """End the worker in order."""
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: CoterieError) -> None:
        """End the worker with an error."""
        self._seating.wake()
        self._outboxes.fail(error)
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _report(self, message: Message) -> None:
        """Tell the coordinator why this worker ends; it may be gone itself."""
        if self._welcome.worker:
            with contextlib.suppress(CoterieError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._send(message)

    async def _close(self) -> None:
        leaving = NetworkError("the worker is leaving")
        await self._seating.close()
        if self._server is not None:
            self._outboxes.fail(leaving)
            await asyncio.to_thread(self._server.end, COMPUTE_END_S)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._outboxes.abandon(leaving)
        if self._lost is None:
            await self._link.close()
        else:
            self._link.abort()
