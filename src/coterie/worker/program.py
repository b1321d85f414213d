"""The program on every device: prepare the process, join, work, leave in order."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from coterie.errors import CoterieError, InterruptedRunError
from coterie.ids import WorkerId
from coterie.measure.allocator import use_one_arena
from coterie.transport.connect import connect
from coterie.transport.frame import Frame
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer
from coterie.units import MIB
from coterie.worker.device import require_device
from coterie.worker.host import host_id, is_local
from coterie.worker.own_device import OwnDevice
from coterie.worker.peers import Peers
from coterie.worker.settings import WorkerSettings
from coterie.worker.visit import Visit

THREAD_STACK_BYTES = 2 * MIB


class WorkerProgram:
    """One worker's process, from joining to leaving. `say` tells the device's owner what happens, a line each."""

    def __init__(self, settings: WorkerSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._device = OwnDevice(settings, say)
        self._peers = Peers(self._take_data, self._peer_lost, host_id())
        self._visit: Visit | None = None

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
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
        server = FrameServer(self._peers.serve)
        if self._settings.direct_links:
            # A run on one machine needs no port that others can see.
            await server.start("127.0.0.1" if is_local(join) else None)
        try:
            self._visit = Visit(self._device, self._peers, await connect(join))
            await self._visit.run(join, server)
        finally:
            await asyncio.to_thread(self._device.close)
            await self._peers.close()
            await server.close()

    def _take_data(self, frame: Frame) -> None:
        if self._visit is not None:
            self._visit.take_data(frame)

    def _peer_lost(self, worker: WorkerId, error: CoterieError) -> None:
        if self._visit is not None:
            self._visit.peer_lost(worker, error)


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
