"""The program on every device: prepare the process, join, work, leave in order."""

import asyncio
import contextlib
import math
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from coterie.clock import SystemClock
from coterie.errors import CoterieError, InterruptedRunError, JoinRefusedError, NetworkError
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.measure.absent import Absent
from coterie.measure.allocator import free_memory, use_one_arena
from coterie.measure.process_memory import lift_memory_limit
from coterie.transport.connect import connect
from coterie.transport.frame import Frame
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer
from coterie.transport.stream_link import StreamLink
from coterie.units import MIB, format_seconds
from coterie.worker.device import require_device
from coterie.worker.host import host_id, is_local
from coterie.worker.keep_awake import KeepAwake, find_waker
from coterie.worker.own_device import OwnDevice
from coterie.worker.peers import Peers
from coterie.worker.priority import lower_priority
from coterie.worker.rejoin import Redial
from coterie.worker.settings import WorkerSettings
from coterie.worker.visit import Visit
from coterie.worker.vitals import OwnVitals
from coterie.worker.watch import DeviceWatch

log = get_logger(__name__)

THREAD_STACK_BYTES = 2 * MIB

LEAVE_PATIENCE_S = 60.0
"""How long a worker that its owner stops waits for its layers to be moved; services give a process 90 s."""

ALLOWED_POLL_S = 2.0
"""How often a worker that may not begin looks whether it may now."""


class WorkerProgram:
    """One worker's process, from joining to leaving. `say` tells the device's owner what happens, a line each."""

    def __init__(self, settings: WorkerSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        clock = SystemClock()
        self._device = OwnDevice(settings, say)
        awake = KeepAwake(find_waker() if settings.keep_awake else Absent(reason="switched off"))
        self._watch = DeviceWatch(self._device, OwnVitals(settings, clock), awake, clock)
        self._peers = Peers(self._take_data, self._peer_lost, host_id())
        self._visit: Visit | None = None

    async def run(self, join: JoinLink) -> None:
        """Join and work until the run is over.

        Raises:
            CoterieError: Refused, lost the coordinator, or failed.
        """
        require_device(self._settings.device_type)
        if self._settings.terms.yields_to is not None:
            lower_priority()
        await self._until_allowed()
        torch.set_num_threads(self._settings.threads)
        use_one_arena()
        # Every thread's stack counts against an enforced memory limit, and glibc maps 8 MiB for each.
        threading.stack_size(THREAD_STACK_BYTES)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
        server = FrameServer(self._peers.serve)
        if self._settings.direct_links:
            # A run on one machine needs no port that others can see.
            await server.start("127.0.0.1" if is_local(join) else None)
        try:
            lost = await self._stay(await self._first_link(join), join, server)
            while lost is not None:
                lost = await self._come_back(lost, join, server)
        finally:
            lift_memory_limit()
            self._watch.close()
            await asyncio.to_thread(self._device.close)
            await self._peers.close()
            await server.close()

    async def _first_link(self, join: JoinLink) -> StreamLink:
        """Dial the coordinator; where the owner says so, for as long as it takes.

        Raises:
            NetworkError: It is not there.
            JoinRefusedError: Somebody else answers.
        """
        try:
            return await connect(join)
        except (NetworkError, JoinRefusedError) as error:
            if not self._settings.waits:
                raise
            self._device.say(f"waiting for the coordinator: {error.message}")
        return await Redial(join, math.inf, SystemClock()).next_link()

    async def _stay(self, link: StreamLink, join: JoinLink, server: FrameServer) -> CoterieError | None:
        """Join over an open link and work until the run is over, or the coordinator is lost: then this says why."""
        self._visit = Visit(self._device, self._peers, link, self._watch)
        return await self._visit.run(join, server)

    async def _come_back(self, lost: CoterieError, join: JoinLink, server: FrameServer) -> CoterieError | None:
        """Try to join again, for as long as the coordinator asked for; then stay there as before.

        Raises:
            CoterieError: It did not come back, or refuses.
        """
        assert self._visit is not None
        limit_s = self._visit.rejoin_s
        self._peers.forget()
        await asyncio.to_thread(free_memory)
        say = self._device.say
        say(f"the coordinator is lost ({lost.message}): trying to come back for {format_seconds(limit_s)}")
        redial = Redial(join, limit_s, SystemClock(), parent=self._settings.parent)
        while True:
            link = await redial.next_link()
            try:
                return await self._stay(link, join, server)
            except NetworkError:
                if self._visit.is_welcome:
                    raise
                log.info("the coordinator went before it had let this worker in")

    async def ask_to_leave(self, reason: str) -> bool:
        """Ask the coordinator to move this worker's layers and let it go; False if nobody relies on it."""
        return self._visit is not None and await self._visit.ask_to_leave(reason)

    async def _until_allowed(self) -> None:
        """Wait while the owner's terms do not hold, for a charger to be plugged in, say."""
        told = ""
        while reason := self._watch.forbids():
            if not told:
                self._device.say(f"waiting before it joins: {reason}")
            told = reason
            await asyncio.sleep(ALLOWED_POLL_S)

    def _take_data(self, frame: Frame) -> None:
        if self._visit is not None:
            self._visit.take_data(frame)

    def _peer_lost(self, worker: WorkerId, error: CoterieError) -> None:
        if self._visit is not None:
            self._visit.peer_lost(worker, error)


async def run_worker(join: JoinLink, settings: WorkerSettings, say: Callable[[str], None]) -> None:
    """Join a run and work for it until it is over. On Ctrl-C or SIGTERM it asks to be let go; on a second one it goes.

    Raises:
        InterruptedRunError: Stopped by its owner, before it was let go.
        CoterieError: Refused, lost the coordinator for good, or failed.
    """
    task = asyncio.current_task()
    assert task is not None
    program = WorkerProgram(settings, say)
    interrupts = _Interrupts(program, task, say)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows, or not the main thread
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, interrupts.interrupt)
    try:
        await program.run(join)
    except asyncio.CancelledError:
        task.uncancel()
        raise InterruptedRunError("the worker was stopped by its owner") from None
    finally:
        interrupts.close()


class _Interrupts:
    """What the owner's Ctrl-C means: at first a wish, which the coordinator has some time to grant."""

    def __init__(self, program: WorkerProgram, task: "asyncio.Task[None]", say: Callable[[str], None]) -> None:
        self._program = program
        self._task = task
        self._say = say
        self._wish: asyncio.Task[None] | None = None

    def interrupt(self) -> None:
        """Once: ask to be released. Again: at once."""
        if self._wish is None:
            self._wish = asyncio.get_running_loop().create_task(self._ask())
        else:
            self._task.cancel()

    async def _ask(self) -> None:
        if await self._program.ask_to_leave("stopped by its owner"):
            self._say(f"asking to be let go, for {LEAVE_PATIENCE_S:.0f} s at most (once more: at once)")
            await asyncio.sleep(LEAVE_PATIENCE_S)
        self._task.cancel()

    def close(self) -> None:
        """Nothing more is wished."""
        if self._wish is not None:
            self._wish.cancel()
