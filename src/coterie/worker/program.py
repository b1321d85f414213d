"""The program on every device: join, measure, build a stage, run it, leave in order."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from coterie.cluster.message import Message
from coterie.cluster.messages import (
    BATCH,
    CONTROL,
    DONE,
    GRADIENT,
    HIDDEN,
    TIED,
    WEIGHTS,
    Assign,
    Generate,
    Goodbye,
    Heartbeat,
    LinksMeasured,
    MeasureLinks,
    NormTotal,
    Profiled,
    ProfileRequest,
    Refused,
    RunSegment,
    SaveState,
    StageReady,
    Stop,
    Welcome,
    control,
    unpack,
)
from coterie.errors import (
    CoterieError,
    InterruptedRunError,
    NetworkError,
    ProtocolError,
    WorkerLostError,
    error_from_slug,
)
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.logs import get_logger
from coterie.measure.allocator import use_one_arena
from coterie.measure.budget import memory_budget
from coterie.measure.process_memory import current_rss_bytes, limit_memory
from coterie.planner.explain import name_units
from coterie.profiles.cluster_profile import RESERVE_PERCENT, LinkProfile
from coterie.tensors.codecs import decode
from coterie.transport.connect import connect
from coterie.transport.frame import Frame
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer
from coterie.transport.stream_link import StreamLink
from coterie.units import MIB, format_bytes
from coterie.worker.device import measured_device, require_device
from coterie.worker.greeting import hello_of
from coterie.worker.host import host_id, is_local
from coterie.worker.last_words import explained, failed
from coterie.worker.mailbox import Mailbox
from coterie.worker.network_ports import NORM_TOTAL, Place
from coterie.worker.outbox import Outbox
from coterie.worker.peers import Peers
from coterie.worker.settings import WorkerSettings
from coterie.worker.sharing import DeviceSharing
from coterie.worker.side_ports import make_ports
from coterie.worker.side_role import ServerRole
from coterie.worker.stage_runner import StageRunner

log = get_logger(__name__)

UNSENT_LIMIT_BYTES = 32 * MIB
"""Tensors waiting for a slow link before its stage waits too."""

THREAD_STACK_BYTES = 2 * MIB

NEWS_S = 3.0
"""How long a broken link waits for the coordinator's word: it knows which worker was lost, this one does not."""

COMPUTE_END_S = 20.0
"""How long the compute thread has to come out of what it does; ending the process under it would crash it."""

_DATA_KINDS = (BATCH, HIDDEN, GRADIENT, DONE, TIED)


class WorkerProgram:
    """One worker, from joining to leaving. `say` tells the device's owner what happens, a line each."""

    def __init__(self, settings: WorkerSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox()
        self._outboxes: dict[WorkerId, Outbox] = {}
        self._peers = Peers(self._take_data, self._peer_lost, host_id())
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcome = Welcome(worker=WorkerId(""), run=RunId(""), heartbeat_s=2.0, silence_limit_s=30.0)
        self._link: StreamLink | None = None
        self._assign: Assign | None = None
        self._runner: StageRunner | None = None
        self._server: ServerRole | None = None
        self._sharing: DeviceSharing | None = None
        self._shares = False
        self._tensors: dict[str, Tensor] = {}
        self._units_missing: set[int] = set()

    async def run(self, join: JoinLink) -> None:
        """Join and work until the run is over.

        Raises:
            CoterieError: Refused, lost the coordinator, or failed.
        """
        require_device(self._settings.device_type)
        torch.set_num_threads(self._settings.threads)
        use_one_arena()
        # Every thread's stack counts against an enforced memory limit, and glibc maps 8 MiB for each.
        threading.stack_size(THREAD_STACK_BYTES)
        self._loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        server = FrameServer(self._peers.serve)
        if self._settings.direct_links:
            # A run on one machine needs no port that others can see.
            await server.start("127.0.0.1" if is_local(join) else None)
        try:
            self._link = await connect(join)
            self._outboxes[COORDINATOR] = Outbox(self._link, self._loop, limit_bytes=UNSENT_LIMIT_BYTES)
            if self._settings.role == "server":
                self._server = ServerRole(
                    self._settings,
                    self._say,
                    self._outboxes[COORDINATOR],
                    fail_from_thread=self._fail_from_thread,
                    leave=self._leave,
                )
            await self._greet(join, server)
            self._spawn(self._read_coordinator())
            self._spawn(self._beat())
            await self._ended
        except CoterieError as error:
            await self._report(failed(error))
            raise
        except asyncio.CancelledError:
            await self._report(Goodbye(reason="stopped by its owner"))
            raise
        finally:
            await self._close(server)

    async def _greet(self, join: JoinLink, server: FrameServer) -> None:
        assert self._link is not None
        settings = self._settings
        budget = memory_budget(settings.memory_bytes, device_type=settings.device_type)
        if settings.enforce_memory and settings.memory_bytes and not limit_memory(settings.memory_bytes):
            self._say(
                f"the memory limit is planned with but not enforced: this system cannot, or the worker's own "
                f"{format_bytes(current_rss_bytes())} are more"
            )
        await self._send(hello_of(settings, join, server, budget.bytes))
        frame = await self._link.receive()
        answer = unpack(frame.header.body) if frame.header.kind == CONTROL else None
        match answer:
            case Welcome():
                self._welcome = answer
                self._say(f"joined run {answer.run} as {answer.worker} ({budget.why}; {RESERVE_PERCENT} % kept back)")
            case Refused(slug=slug, message=message, hint=hint):
                raise error_from_slug(slug, message, hint)
            case _:
                raise ProtocolError(f"the coordinator answered a hello with a {frame.header.kind} frame")

    async def _read_coordinator(self) -> None:
        assert self._link is not None
        while True:
            frame = await self._next_frame(self._link)
            if self._server is not None and await self._server.takes(frame, self._welcome.worker):
                continue
            if frame.header.kind == CONTROL:
                await self._handle(unpack(frame.header.body), frame)
            elif frame.header.kind == WEIGHTS:
                await self._take_weights(frame)
            else:
                self._take_data(frame)

    async def _next_frame(self, link: StreamLink) -> Frame:
        """The coordinator's next frame. Silence is a link on which no byte moves: large frames take their time."""
        limit_s = self._welcome.silence_limit_s
        while True:
            received = link.bytes_received
            try:
                async with asyncio.timeout(limit_s):
                    return await link.receive()
            except TimeoutError:
                if link.bytes_received == received:
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
            case Assign():
                self._accept(message)
            case RunSegment() | Generate() | SaveState() if self._runner is not None:
                self._runner.submit(message)
            case NormTotal():
                self._mailbox.put((NORM_TOTAL, message.step, 0), frame)
            case Stop(reason=reason):
                self._say(f"the run is over{f': {reason}' if reason else ''}")
                if self._server is None or not self._server.is_alone:
                    self._leave()
                with contextlib.suppress(CoterieError):  # the coordinator may have closed the link already
                    await self._send(Goodbye(reason=reason))
            case _:
                raise ProtocolError(f"the coordinator sent {type(message).__name__}, which a worker has no use for now")

    async def _profile(self, request: ProfileRequest) -> None:
        self._say("measuring this device")
        await self._send(await asyncio.to_thread(self._measured, request))

    def _measured(self, request: ProfileRequest) -> Profiled:
        """What this device can do; in a thread of its own. Backends are looked for only where they may take part."""
        if self._sharing is None and self._settings.shares_layers:
            self._sharing = DeviceSharing(self._settings, self._say)
        measured = measured_device(self._settings, request, self._welcome.worker, sharing=self._sharing)
        self._shares = measured.profile.allocation is not None
        return measured

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

    def _accept(self, assign: Assign) -> None:
        place = assign.plan.stages[assign.stage]
        self._assign = assign
        self._units_missing = set(range(place.first_unit, place.stop_unit))
        self._tensors = {}
        layers = name_units(place.first_unit, place.stop_unit, assign.plan.units)
        self._say(f"stage {assign.stage} of {len(assign.plan.stages)}: {layers}")

    async def _take_weights(self, frame: Frame) -> None:
        body = unpack(frame.header.body)
        if self._assign is None or getattr(body, "unit", None) not in self._units_missing:
            raise ProtocolError("weights came that this stage did not wait for")
        for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True):
            self._tensors[spec.name] = decode(spec, buffer)
        self._units_missing.discard(getattr(body, "unit"))  # noqa: B009 -- checked just above
        if not self._units_missing:
            tensors, self._tensors = self._tensors, {}
            await self._build(self._assign, tensors)

    async def _build(self, assign: Assign, tensors: dict[str, Tensor]) -> None:
        worker = self._welcome.worker
        place = Place(run=assign.run, worker=worker, plan=assign.plan, stage=assign.stage, tied_peer=assign.tied_peer)
        for peer, link in self._peers.links.items():
            self._outboxes[peer] = Outbox(link, self._loop, limit_bytes=UNSENT_LIMIT_BYTES)
        self._runner = StageRunner(worker, assign, self._settings, self._outbox_to, self._fail_from_thread)
        self._runner.sharing = self._sharing if self._shares else None
        ports = make_ports(assign, place, self._mailbox, self._outbox_to)
        await asyncio.to_thread(self._runner.build, tensors, ports)
        is_last = assign.stage == len(assign.plan.stages) - 1
        link_to_next = "" if is_last else self._peers.carriers.get(place.next, "relayed")
        await self._send(StageReady(stage=assign.stage, link_to_next=link_to_next))

    def _outbox_to(self, worker: WorkerId) -> Outbox:
        return self._outboxes.get(worker) or self._outboxes[COORDINATOR]

    def _take_data(self, frame: Frame) -> None:
        header = frame.header
        if self._server is not None:
            self._server.take_data(frame)
        elif self._assign is None or (header.run, header.plan_version) != (
            self._assign.run,
            self._assign.plan.version,
        ):
            log.info("a %s frame of another run or plan was dropped", header.kind)
        elif header.kind in _DATA_KINDS:
            self._mailbox.put((header.kind, header.step, header.micro_batch), frame)
        else:
            raise ProtocolError(f"{header.source or 'a peer'} sent a frame of kind {header.kind[:40]!r}")

    def _peer_lost(self, worker: WorkerId, error: CoterieError) -> None:
        neighbours = set()
        if self._assign is not None:
            neighbours = {stage.worker for stage in self._assign.plan.stages}
        if worker in neighbours:
            self._fail_later(WorkerLostError(f"the link to {worker} ended: {error.message}"))

    def _fail_later(self, error: CoterieError) -> None:
        """Fail unless the coordinator ends the run before."""
        self._loop.call_later(NEWS_S, self._fail, error)

    async def _beat(self) -> None:
        with contextlib.suppress(CoterieError):  # the link is gone: its reader says why, after what came before
            while True:
                await asyncio.sleep(self._welcome.heartbeat_s)
                await self._send(Heartbeat(rss_bytes=current_rss_bytes()))

    async def _send(self, message: Message) -> None:
        assert self._link is not None
        await self._link.send(control(message, source=self._welcome.worker))

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._server is not None and self._server.is_alone and isinstance(error, NetworkError):
            self._say("the coordinator has left")
        else:
            self._fail(explained(error))

    def _fail_from_thread(self, error: CoterieError) -> None:
        is_link = isinstance(error, NetworkError | WorkerLostError)
        self._loop.call_soon_threadsafe(self._fail_later if is_link else self._fail, error)

    def _leave(self) -> None:
        """End the worker in order."""
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: CoterieError) -> None:
        """End the worker with an error."""
        self._wake(error)
        if not self._ended.done():
            self._ended.set_exception(error)

    def _wake(self, error: CoterieError) -> None:
        """Wake the compute thread, should it wait for a frame or for room to send."""
        self._mailbox.fail(error)
        for outbox in self._outboxes.values():
            outbox.fail(error)

    async def _report(self, message: Message) -> None:
        """Tell the coordinator why this worker ends; it may be gone itself."""
        if self._link is not None and self._welcome.worker:
            with contextlib.suppress(CoterieError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._send(message)

    async def _close(self, server: FrameServer) -> None:
        if self._runner is not None:
            self._wake(NetworkError("the worker is leaving"))
            await asyncio.to_thread(self._runner.end, COMPUTE_END_S)
        if self._server is not None:
            self._outboxes[COORDINATOR].fail(NetworkError("the server is leaving"))
            await asyncio.to_thread(self._server.end, COMPUTE_END_S)
        if self._sharing is not None:
            await asyncio.to_thread(self._sharing.close)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for outbox in self._outboxes.values():
            outbox.cancel()
        await self._peers.close()
        if self._link is not None:
            await self._link.close()
        await server.close()


async def run_worker(join: JoinLink, settings: WorkerSettings, say: Callable[[str], None]) -> None:
    """Join a run and work for it until it is over. Ctrl-C or SIGTERM: tell the coordinator and leave.

    Raises:
        InterruptedRunError: Stopped by its owner.
        CoterieError: Refused, lost the coordinator, or failed.
    """
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows, or not the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await WorkerProgram(settings, say).run(join)
    except asyncio.CancelledError:
        task.uncancel()
        raise InterruptedRunError("the worker was stopped by its owner") from None
