"""A frame's bytes: a fixed preamble, the msgpack header, the tensors' raw bytes one after the other.

    magic 4 B | wire version u16 | reserved u16 | header length u32 | payload length u64 | header | payload

The reserved field is 0; or 1 where two processes share memory and the tensors lie there: then a u64 that says where
stands in the payload's place. All numbers are little-endian. Magic and version keep their place in every future
version, so that two ends of different versions can name both. Nothing here does I/O: `FrameReader` hands out the memory
that the next bytes belong into.
"""

import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from coterie.errors import OutOfMemoryError, ProtocolError, VersionMismatchError
from coterie.transport.frame import Buffer, Frame, FrameHeader
from coterie.transport.limits import Limits, check_header, check_preamble
from coterie.units import format_bytes

WIRE_VERSION = 1
MAGIC = b"COTR"
PREAMBLE = struct.Struct("<4sHHIQ")
IN_MEMORY = 1
"""The reserved field of a frame whose tensors lie in shared memory."""
PLACE = struct.Struct("<Q")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(FrameHeader, strict=True)


def frame_head(frame: Frame, limits: Limits) -> bytes:
    """The preamble and header that go before a frame's tensors.

    Raises:
        ProtocolError: The frame breaks a limit, or a buffer is not as long as its spec says.
    """
    header = _ENCODER.encode(frame.header)
    payload_bytes = frame.payload_bytes
    check_preamble(len(header), payload_bytes, limits)
    check_header(frame.header, payload_bytes, limits)
    sizes = tuple(memoryview(buffer).nbytes for buffer in frame.buffers)
    announced = tuple(spec.nbytes for spec in frame.header.tensors)
    if sizes != announced:
        raise ProtocolError(f"a frame's buffers hold {sizes} bytes, its header says {announced}")
    return PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, len(header), payload_bytes) + header


def placed_head(head: bytes, offset: int) -> bytes:
    """What goes over the socket of a frame whose tensors lie in shared memory: its head and where they begin."""
    magic, version, _, header_bytes, payload_bytes = PREAMBLE.unpack_from(head)
    preamble = PREAMBLE.pack(magic, version, IN_MEMORY, header_bytes, payload_bytes)
    return preamble + head[PREAMBLE.size :] + PLACE.pack(offset)


def version_mark() -> bytes:
    """A preamble that says no more than the version: for a peer of another one, before its link is closed."""
    return PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, 1, 0)


def flat_view(buffer: Buffer) -> memoryview:
    """A buffer as a flat view of bytes, nothing copied."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class FrameReader:
    """Turns a byte stream into frames: ask `target()` where the next bytes go, then `advance()` by how many came.

    Tensor bytes thus land where they stay; each tensor has a buffer of its own, aligned for any dtype. Once `advance`
    has raised, the stream is lost: there is no way to find the next frame in it.

    Attributes:
        take: Copies tensors out of shared memory, from an offset on, into buffers; None where none is shared.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.take: Callable[[int, Sequence[memoryview]], None] | None = None
        self._preamble = memoryview(bytearray(PREAMBLE.size))
        self._pieces: list[memoryview] = []
        self._header: FrameHeader | None = None
        self._buffers: tuple[memoryview, ...] = ()
        self._place: memoryview | None = None
        self._payload_bytes = 0
        self._begin()

    def target(self) -> memoryview:
        """The memory that the next bytes of the stream belong into; never empty."""
        return self._piece[self._filled :] if self._filled else self._piece

    @property
    def missing_bytes(self) -> int:
        """Bytes that must still come before the current tensors are whole; 0 while a header is read."""
        return self._missing_bytes

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return self._piece is not self._preamble or self._filled > 0

    def advance(self, count: int) -> Frame | None:
        """Account for `count` bytes written into `target()`.

        Returns:
            The frame that they complete, if any.

        Raises:
            ProtocolError: The bytes are no frame, or one over the limits, or its tensors lie outside the shared memory.
            VersionMismatchError: The peer speaks another version of the wire format.
            OutOfMemoryError: The frame is within the limits but memory for it cannot be had; with a `count` of 0 it is
                tried again.
        """
        self._filled += count
        if self._header is not None:
            self._missing_bytes -= count
        if self._filled < len(self._piece):
            return None
        if self._piece is self._preamble:
            self._read_preamble()
            return None
        if self._header is None:
            self._read_header()
        return self._next_piece()

    def _begin(self) -> None:
        self._piece = self._preamble
        self._filled = 0
        self._header = None
        self._buffers = ()
        self._missing_bytes = 0

    def _read_preamble(self) -> None:
        magic, version, reserved, header_bytes, payload_bytes = PREAMBLE.unpack(self._preamble)
        if magic != MAGIC:
            raise ProtocolError(
                f"the peer's bytes are no frame: they begin with {bytes(magic).hex()}, a frame with {MAGIC.hex()}"
            )
        if version != WIRE_VERSION:
            raise VersionMismatchError(
                f"the peer speaks wire format {version}, this side speaks {WIRE_VERSION}",
                hint="install the same version of coterie on every device",
            )
        if reserved and (reserved != IN_MEMORY or self.take is None):
            raise ProtocolError(f"the reserved field of a frame is {reserved}, not 0")
        check_preamble(header_bytes, payload_bytes, self.limits)
        self._payload_bytes = payload_bytes
        self._place = memoryview(bytearray(PLACE.size)) if reserved else None
        self._piece = memoryview(bytearray(header_bytes))
        self._filled = 0

    def _read_header(self) -> None:
        try:
            header = _DECODER.decode(self._piece)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a frame header of {len(self._piece)} bytes cannot be understood: {error}") from error
        check_header(header, self._payload_bytes, self.limits)
        try:
            # np.empty does not touch the memory: a peer that announces much and sends little costs little.
            self._buffers = tuple(np.empty(spec.nbytes, np.uint8).data for spec in header.tensors)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"no memory for a received frame with {format_bytes(self._payload_bytes)} of tensors"
            ) from error
        if self._place is None:
            self._pieces = [buffer for buffer in reversed(self._buffers) if buffer.nbytes]
            self._missing_bytes = self._payload_bytes
        else:
            self._pieces = [self._place]
            self._missing_bytes = PLACE.size
        self._header = header

    def _next_piece(self) -> Frame | None:
        if self._pieces:
            self._piece = self._pieces.pop()
            self._filled = 0
            return None
        assert self._header is not None
        if self._place is not None:
            assert self.take is not None
            (offset,) = PLACE.unpack(self._place)
            self.take(offset, self._buffers)
        frame = Frame(self._header, self._buffers)
        self._begin()
        return frame
