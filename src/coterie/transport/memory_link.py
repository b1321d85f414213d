"""Two links joined in memory: for stages in one process, and for tests that need no network."""

import asyncio
from collections import deque

from coterie.errors import NetworkError, ProtocolError
from coterie.transport.frame import Frame
from coterie.transport.limits import Limits, check_header, check_preamble
from coterie.transport.wire import flat_view, frame_head
from coterie.units import MIB


class MemoryLink:
    """One end of an in-memory pair; like a network link it hands over copies, holds limits and lets `send` wait."""

    def __init__(self, limits: Limits, outgoing: "_Pipe", incoming: "_Pipe") -> None:
        self.limits = limits
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    @property
    def bytes_sent(self) -> int:
        """Bytes that the frames sent so far would take on a network."""
        return self._outgoing.bytes_put

    @property
    def bytes_received(self) -> int:
        """Bytes that the frames received so far would have taken on a network."""
        return self._incoming.bytes_taken

    @property
    def is_closed(self) -> bool:
        """Whether this end or the other was closed."""
        return self._outgoing.closed

    async def send(self, frame: Frame) -> None:
        """See `Link.send`."""
        self._check_open()
        head_bytes = len(frame_head(frame, self.limits))
        buffers = [memoryview(bytearray(flat_view(buffer))) for buffer in frame.buffers]
        self._outgoing.put(Frame(frame.header, buffers), head_bytes)
        await self._outgoing.drain()
        self._check_open()

    async def receive(self) -> Frame:
        """See `Link.receive`."""
        if self._closed:
            raise NetworkError("the link is closed")
        frame, head_bytes = await self._incoming.take()
        try:
            check_preamble(head_bytes, frame.payload_bytes, self.limits)
            check_header(frame.header, frame.payload_bytes, self.limits)
        except ProtocolError:
            await self.close()
            raise
        return frame

    async def flush(self) -> None:
        """What was sent is a copy: there is nothing to wait for."""
        self._check_open()

    async def close(self) -> None:
        """See `Link.close`."""
        self._closed = True
        self._outgoing.close()
        self._incoming.close()

    def _check_open(self) -> None:
        if self._outgoing.closed:
            raise NetworkError("the link is closed" if self._closed else "the peer closed the link")


class _Pipe:
    """One direction."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[tuple[Frame, int]] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.bytes_put = 0
        self.bytes_taken = 0
        self.closed = False

    def put(self, frame: Frame, head_bytes: int) -> None:
        self._frames.append((frame, head_bytes))
        self.bytes_put += head_bytes + frame.payload_bytes
        self._arrived.set()
        if self.bytes_put - self.bytes_taken > self._max_bytes:
            self._room.clear()

    async def drain(self) -> None:
        if not self.closed:
            await self._room.wait()

    async def take(self) -> tuple[Frame, int]:
        while not self._frames:
            if self.closed:
                raise NetworkError("the peer closed the link")
            self._arrived.clear()
            await self._arrived.wait()
        frame, head_bytes = self._frames.popleft()
        self.bytes_taken += head_bytes + frame.payload_bytes
        if self.bytes_put - self.bytes_taken <= self._max_bytes:
            self._room.set()
        return frame, head_bytes

    def close(self) -> None:
        self.closed = True
        self._arrived.set()
        self._room.set()


def memory_pair(limits: Limits | None = None, *, max_unsent_bytes: int = 8 * MIB) -> tuple[MemoryLink, MemoryLink]:
    """Two ends of one in-memory connection."""
    one_way, other_way = _Pipe(max_unsent_bytes), _Pipe(max_unsent_bytes)
    both = limits or Limits()
    return MemoryLink(both, one_way, other_way), MemoryLink(both, other_way, one_way)
