"""The frame stream over asyncio: received straight into the tensors' own memory, sent with bounded queues.

Why a `BufferedProtocol` under asyncio's own TLS, with `SO_RCVLOWAT` on the socket beneath it: at 100 Mbit/s a receiver
that wakes for every packet spends most of its CPU on waking. The mark counts bytes of the socket, and TLS only adds to
them, so it holds for encrypted bytes as well if what the TLS layer may have buffered (less than one record) is
subtracted. Measured by `benchmarks/links.py` on a busy two-core machine, receiver's CPU per 8 MiB at 100 Mbit/s:

| | no TLS | TLS |
|---|---|---|
| this | 9-11 ms | 26-45 ms |
| this without the mark | 103-173 ms | 160-190 ms |
| raw blocking socket | 77-95 ms | 61-85 ms |
"""

import asyncio
import ssl
from collections import deque

from coterie.errors import CoterieError, NetworkError, OutOfMemoryError, ProtocolError, VersionMismatchError
from coterie.logs import get_logger
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.limits import Limits
from coterie.transport.shared_memory import DescriptorSocket, SharedMemory, make_memory, open_memory
from coterie.transport.socket_options import LowWater, notice_dead_peer
from coterie.transport.wire import FrameReader, flat_view, frame_head, placed_head, version_mark
from coterie.units import MIB

_log = get_logger(__name__)

CHUNK_BYTES = MIB
"""Written to the transport at a time; asyncio may copy what the socket does not take of it."""
TLS_CHUNK_BYTES = 64 * 1024
"""The same with TLS, which encrypts all of a write before it sends any: small enough for the processor's cache."""
TURN_BYTES = 4 * MIB
"""Written before other tasks get their turn, should the socket never fill."""
CLOSE_TIMEOUT_S = 5.0
MEMORY_PATIENCE_S = 8.0
"""How long a frame that finds no memory is waited with: a stage that ends gives its memory back in a moment. Less than
the silence after which a peer counts as lost."""
MEMORY_RETRY_S = 0.1
MAX_UNREAD_BYTES = 8 * MIB
FRAME_OBJECTS_BYTES = 1024
"""What a frame that nobody has read costs beside its bytes; a flood of empty frames must pause reading, too."""

MEMORY_NOTE = FrameHeader(kind="shared-memory")
"""Says that memory is shared from here on; the dialled end sends it with the memory, the other one answers with it."""
NOTE_BYTES = frame_head(Frame(MEMORY_NOTE), Limits())


class StreamLink(asyncio.BufferedProtocol):
    """A `Link` over one TCP, TLS or Unix-socket connection.

    Buffers given to `send` are not copied: they must not change until they are sent, which `flush` waits for.

    Args:
        limits: Of frames in both directions; settable at any time, holds from the next frame on.
        max_unsent_bytes: `send` waits while more than this is queued, the frame it was given included.
        max_unread_bytes: Reading pauses while whole frames of more than this wait for `receive`; settable at any time.
        descriptors: The Unix socket beneath, if the peer may pass memory over it.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        max_unsent_bytes: int = 8 * MIB,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        descriptors: DescriptorSocket | None = None,
    ) -> None:
        self._reader = FrameReader(limits or Limits())
        self._max_unsent_bytes = max_unsent_bytes
        self.max_unread_bytes = max_unread_bytes
        self._transport: asyncio.Transport | None = None
        self._descriptors = descriptors
        self._memory: SharedMemory | None = None
        self._memory_is_agreed = False
        self._chunk_bytes = CHUNK_BYTES
        self._low_water: LowWater | None = None
        self._outbox: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._bytes_sent = 0
        self._bytes_received = 0
        self._inbox: deque[Frame] = deque()
        self._unread_bytes = 0
        self._writing_paused = False
        self._reading_paused = False
        self._patience_end_s: float | None = None
        self._closing = False
        self._error: CoterieError | None = None
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._flushed = asyncio.Event()
        self._lost = asyncio.Event()
        self._drained.set()
        self._flushed.set()

    # ---- what programs call

    @property
    def limits(self) -> Limits:
        """What a frame may claim, in both directions."""
        return self._reader.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._reader.limits = limits

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the network so far, headers included; those in shared memory count as if sent."""
        return self._bytes_sent + (self._memory.bytes_put if self._memory else 0)

    @property
    def bytes_received(self) -> int:
        """Bytes taken from the network so far, headers included; those in shared memory count as if sent."""
        return self._bytes_received + (self._memory.bytes_taken if self._memory else 0)

    @property
    def is_closed(self) -> bool:
        """Whether the link is closed or broken; frames that arrived before can still be received if it broke."""
        return self._closing or self._error is not None

    @property
    def shares_memory(self) -> bool:
        """Whether large frames may pass through memory that both ends have."""
        return self._memory_is_agreed and not self.is_closed

    async def send(self, frame: Frame) -> None:
        """Queue a frame and wait while more than `max_unsent_bytes` are unsent; may be called by several tasks.

        Raises:
            NetworkError: The link is closed or broke.
            ProtocolError: The frame breaks a limit; nothing was sent.
        """
        self._check_open()
        head = frame_head(frame, self.limits)
        place = self._memory.put(frame.buffers) if self._memory and self._memory_is_agreed else None
        if place is None:
            self._queue(head, *(flat_view(buffer) for buffer in frame.buffers if memoryview(buffer).nbytes))
        else:
            self._queue(placed_head(head, place))
        await self._drained.wait()
        self._raise_error()

    async def flush(self) -> None:
        """Wait until no buffer given to `send` is needed any more.

        Raises:
            NetworkError: The link is closed or broke.
        """
        await self._flushed.wait()
        self._raise_error()

    async def receive(self) -> Frame:
        """Wait for the next frame; the frames that came before the link broke are given first.

        Raises:
            NetworkError: The link closed or broke.
            ProtocolError: The peer sent bytes that are no frame, or one over the limits; the link is closed.
            VersionMismatchError: The peer speaks another wire format; the link is closed.
        """
        while not self._inbox:
            self._check_open()
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._inbox.popleft()
        self._unread_bytes -= _held_bytes(frame)
        self._update_reading()
        return frame

    def share_memory(self) -> None:
        """Let large frames pass through memory from now on. To be called at the dialled end once its peer is let in.

        Without a Unix socket, or where the system or the peer does not play along, all stays as it is.
        """
        transport = self._transport
        if transport is None or self.is_closed or self._memory is not None:
            return
        if self._outbox or transport.get_write_buffer_size():
            _log.debug("no shared memory: something is being sent")
            return
        self._memory = make_memory(transport.get_extra_info("socket"), NOTE_BYTES)
        if self._memory is not None:
            self._reader.take = self._memory.take

    async def close(self) -> None:
        """Flush what is queued, then close; idempotent. After some seconds without progress: at once."""
        if not self._closing:
            self._closing = True
            self._arrived.set()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._flushed.wait()
                if self._transport is not None:
                    self._transport.close()
                    await self._lost.wait()
        except TimeoutError:
            _log.info("the peer did not take the last bytes within %s s; closed without", CLOSE_TIMEOUT_S)
        finally:
            self.abort()

    def abort(self, error: CoterieError | None = None) -> None:
        """Close at once; what is queued is lost. `error` is what `receive` and `send` then raise."""
        self._fail(error or NetworkError("the link is closed"))
        if self._transport is not None:
            self._transport.abort()

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands: set its options."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        encrypted = isinstance(transport.get_extra_info("ssl_object"), ssl.SSLObject)
        if encrypted:
            self._chunk_bytes = TLS_CHUNK_BYTES
        else:
            # Pause as soon as the socket takes no more: what asyncio keeps of a write, copied or not, then is known to
            # be sent once it resumes.
            transport.set_write_buffer_limits(high=0)
        if sock is not None:
            notice_dead_peer(sock)
            self._low_water = LowWater(sock, encrypted=encrypted)
        if self._error is not None:
            transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next received bytes go."""
        if self._error is None:
            return self._reader.target()
        return memoryview(bytearray(CHUNK_BYTES))  # the transport was aborted; whatever still comes is dropped

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes were received."""
        self._bytes_received += nbytes
        if self._error is not None:
            return
        try:
            frame = self._reader.advance(nbytes)
            if frame is not None and frame.header == MEMORY_NOTE:
                self._agree_on_memory()
                return
        except OutOfMemoryError as error:
            self._wait_for_memory(error)
            return
        except CoterieError as error:
            _log.info("link closed: %s", error.message)
            if isinstance(error, VersionMismatchError) and self._transport is not None:
                self._transport.write(version_mark())  # so that the peer can name both versions too
            self.abort(error)
            return
        self._patience_end_s = None
        if self._low_water is not None:
            self._low_water.expect(self._reader.missing_bytes)
        if frame is not None:
            self._deliver(frame)
        self._update_reading()

    def eof_received(self) -> bool:
        """The peer sends no more: close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        if self._reader.is_mid_frame:
            missing = self._reader.missing_bytes
            reason = "the peer closed in mid-frame" + (f", {missing} tensor bytes short" if missing else "")
        else:
            reason = "the peer closed the link"
        self._fail(NetworkError(f"{reason}: {exc}" if exc else reason))
        self._transport = None
        self._lost.set()

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """The transport's buffer has room."""
        self._writing_paused = False
        self._pump()

    # ---- inside

    def _agree_on_memory(self) -> None:
        self._bytes_received -= len(NOTE_BYTES)
        if self._memory is None and self._descriptors is not None:
            self._memory = open_memory(self._descriptors.take_descriptors())
            if self._memory is not None:
                self._reader.take = self._memory.take
                self._bytes_sent -= len(NOTE_BYTES)
                self._queue(NOTE_BYTES)
        elif self._memory is None or self._memory_is_agreed:
            raise ProtocolError("the peer speaks of shared memory where there can be none")
        self._memory_is_agreed = self._memory is not None

    def _queue(self, *pieces: bytes | memoryview) -> None:
        self._outbox.extend(memoryview(piece) for piece in pieces)
        self._unsent_bytes += sum(len(piece) for piece in pieces)
        self._flushed.clear()
        if self._unsent_bytes > self._max_unsent_bytes:
            self._drained.clear()
        self._pump()

    def _deliver(self, frame: Frame) -> None:
        self._inbox.append(frame)
        self._arrived.set()
        self._unread_bytes += _held_bytes(frame)

    def _update_reading(self) -> None:
        """Read on, or not: while too much waits to be taken, or memory for the frame that has begun is lacking."""
        pauses = self._unread_bytes > self.max_unread_bytes or self._patience_end_s is not None
        if pauses == self._reading_paused or self._transport is None or self._transport.is_closing():
            return
        self._reading_paused = pauses
        if pauses:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _wait_for_memory(self, error: OutOfMemoryError) -> None:
        """Try again in a moment, for some seconds; the peer waits, as its bytes are not taken."""
        loop = asyncio.get_running_loop()
        if self._patience_end_s is None:
            _log.info("%s: waiting for some", error.message)
            self._patience_end_s = loop.time() + MEMORY_PATIENCE_S
            self._update_reading()
        if loop.time() < self._patience_end_s:
            loop.call_later(MEMORY_RETRY_S, self.buffer_updated, 0)
        else:
            self.abort(error)

    def _pump(self) -> None:
        turn_bytes = 0
        while self._outbox and not self._writing_paused and self._transport is not None and turn_bytes < TURN_BYTES:
            piece = self._outbox[0]
            chunk = piece[: self._chunk_bytes]
            if len(chunk) < len(piece):
                self._outbox[0] = piece[self._chunk_bytes :]
            else:
                self._outbox.popleft()
            self._transport.write(chunk)
            turn_bytes += len(chunk)
        self._unsent_bytes -= turn_bytes
        self._bytes_sent += turn_bytes
        if self._unsent_bytes <= self._max_unsent_bytes:
            self._drained.set()
        if self._writing_paused or self._transport is None:
            return
        if self._outbox:
            asyncio.get_running_loop().call_soon(self._pump)
        else:
            self._flushed.set()

    def _fail(self, error: CoterieError) -> None:
        if self._error is None:
            self._error = error
        if self._memory is not None:
            self._memory.close()
        self._outbox.clear()
        self._unsent_bytes = 0
        for event in (self._arrived, self._drained, self._flushed):
            event.set()

    def _check_open(self) -> None:
        self._raise_error()
        if self._closing:
            raise NetworkError("the link is closed")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # else each raise would add its frames to the same exception


def _held_bytes(frame: Frame) -> int:
    """Memory that a received frame keeps: its tensors, its body, and the objects around them."""
    header = frame.header
    return frame.payload_bytes + len(header.body) + FRAME_OBJECTS_BYTES * (1 + len(header.tensors))
