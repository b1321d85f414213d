"""A worker as the server of a side-tuning run: what it does with what coordinator and devices send."""

import asyncio
from collections.abc import Callable

from torch import Tensor

from coterie.cluster.messages import CONTROL, WEIGHTS, RunSegment, SaveState, control, unpack
from coterie.cluster.side_messages import (
    LABELS,
    ORDER,
    PLAN_VERSION,
    TAPS,
    AssignServer,
    EvaluateSide,
    GoAlone,
    OnItsOwn,
)
from coterie.errors import CoterieError, ProtocolError
from coterie.ids import WorkerId
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame
from coterie.units import format_seconds
from coterie.worker.outbox import Outbox
from coterie.worker.settings import WorkerSettings
from coterie.worker.side_server import SideServer

_SERVER_KINDS = (TAPS, LABELS, ORDER)


class ServerRole:
    """Lives on the event loop; the work itself is done in the server's thread.

    Args:
        outbox: Of the link to the coordinator.
        fail_from_thread: Ends the worker with an error, from any thread.
        leave: Ends the worker in order.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        say: Callable[[str], None],
        outbox: Outbox,
        *,
        fail_from_thread: Callable[[CoterieError], None],
        leave: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._say = say
        self._outbox = outbox
        self._fail_from_thread = fail_from_thread
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._worker = WorkerId("")
        self._assign: AssignServer | None = None
        self._server: SideServer | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the coordinator has left it to go on by itself."""
        return self._server is not None and self._server.is_alone

    def set_speed(self, speed: float) -> None:
        """See `SideServer.set_speed`."""
        if self._server is not None:
            self._server.set_speed(speed)

    async def takes(self, frame: Frame, worker: WorkerId) -> bool:
        """Whether a frame was for the server; then it has been dealt with."""
        self._worker = worker
        if frame.header.kind == CONTROL:
            return await self._handles(unpack(frame.header.body))
        if frame.header.kind == WEIGHTS:
            await self._build(frame)
            return True
        if frame.header.kind not in _SERVER_KINDS:
            return False
        self.take_data(frame)
        return True

    def take_data(self, frame: Frame) -> None:
        """Activations, labels or an order; those of another run are dropped.

        Raises:
            ProtocolError: Such a frame is not for a server.
        """
        header, assign = frame.header, self._assign
        if header.kind not in _SERVER_KINDS:
            raise ProtocolError(f"{header.source or 'a peer'} sent a server a frame of kind {header.kind[:40]!r}")
        if self._server is None or assign is None:
            return
        if (header.run, header.plan_version) == (assign.run, PLAN_VERSION):
            self._server.take(frame)

    async def _handles(self, message: object) -> bool:
        match message:
            case AssignServer():
                self._assign = message
                self._say(f"server of a side network of rank {message.side.rank} over {len(message.layers)} layers")
            case RunSegment() | EvaluateSide() | SaveState() if self._server is not None:
                self._server.submit(message)
            case GoAlone(limit_s=limit_s) if self._server is not None:
                await self._go_alone(message, self._server)
                self._say(f"going on alone, for {format_seconds(limit_s)} at most")
            case _:
                return False
        return True

    async def _build(self, frame: Frame) -> None:
        """The output layer has come: make the side network, and say what is already there."""
        if self._assign is None or self._server is not None:
            raise ProtocolError("weights came that this server did not wait for")
        tensors: dict[str, Tensor] = {}
        for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True):
            tensors[spec.name] = decode(spec, buffer)
        server = SideServer(
            self._worker,
            self._assign,
            self._settings,
            self._outbox,
            on_failure=self._fail_from_thread,
            on_alone=self._leave_from_thread,
        )
        self._server = server  # before it is built: if the link breaks meanwhile, `end` must close its cache
        ready = await asyncio.to_thread(server.build, tensors)
        await asyncio.to_thread(self._outbox.post, ready)

    async def _go_alone(self, message: GoAlone, server: SideServer) -> None:
        answer = OnItsOwn(cache_folder=str(self._settings.cache_folder or ""))
        await asyncio.to_thread(self._outbox.post, control(answer, source=self._worker))
        server.is_alone = True
        server.submit(message)
        self._loop.call_later(message.limit_s, self._leave)

    def _leave_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._leave)

    def end(self, patience_s: float) -> None:
        """See `SideServer.end`."""
        if self._server is not None:
            self._server.end(patience_s)
            self._server = None  # it holds memory, and another one may follow
