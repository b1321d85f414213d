"""Tensors of large frames through memory that two processes of one machine share; all else over their Unix socket.

A Unix socket copies in and out like this does, but in small pieces, with both processes woken for each few of them.
`benchmarks/same_host.py` on two quiet cores, CPU of both processes per frame, two runs:

| | 256 KiB | 1 MiB | 4 MiB | 8 MiB |
|---|---|---|---|---|
| socket alone | 0.54-0.57 ms | 0.91-0.93 ms | 2.5-2.7 ms | 5.3-6.7 ms |
| with shared memory | 0.37-0.41 ms | 0.49-0.51 ms | 1.4-1.5 ms | 3.6-3.8 ms |

The memory is an anonymous file. The end that was dialled makes it and passes it over the socket once the peer has been
let in. It has no name, so nothing is left of it however the processes end. One half carries each direction: the sender
copies a frame's tensors in and sends the frame's header with their offset, the receiver copies them out and says so
with one byte on a second socket. The sender reads those bytes when it next wants room. Nobody is woken for them and
nobody ever waits: a frame that finds no room goes over the Unix socket.
"""

import array
import contextlib
import mmap
import os
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.errors import ProtocolError
from coterie.logs import get_logger
from coterie.transport.frame import Buffer
from coterie.transport.wire import PLACE, flat_view
from coterie.units import MIB

if sys.platform == "linux":
    import fcntl

_log = get_logger(__name__)

HALF_BYTES = 16 * MIB
"""For each direction: two frames of 8 MiB. Only as much of it as frames have ever filled takes memory."""
LEAST_BYTES = 256 * 1024
"""Smaller frames gain little: waking the receiver is most of what they cost, and that stays."""
ALIGN_BYTES = 64
_DESCRIPTORS = 2
Bytes = npt.NDArray[np.uint8]


class Ring:
    """Where in a piece of memory the next frame may lie; frames are freed in the order in which they came."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._used: deque[int] = deque()  # where each frame begins, the oldest first
        self._head = 0

    def place(self, nbytes: int) -> int | None:
        """Take room for a frame; its offset, or None if there is none."""
        taken = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        start, end = self._head, self._size_bytes
        if not self._used:
            start = 0  # the same memory again and again, as long as the receiver keeps up
        elif start <= self._used[0]:
            end = self._used[0]
        elif start + taken > end:
            start, end = 0, self._used[0]
        if taken == 0 or start + taken > end:
            return None
        self._used.append(start)
        self._head = start + taken
        return start

    def withdraw(self) -> None:
        """Give back the newest frame, of which the peer knows nothing yet."""
        self._head = self._used.pop()

    def free(self, frames: int) -> None:
        """Give back the oldest frames. A peer that frees more than it has got gains nothing by it."""
        for _ in range(min(frames, len(self._used))):
            self._used.popleft()


class SharedMemory:
    """One end of the memory that two links share.

    Args:
        descriptor: Of the memory; closed with this.
        memory: The same, mapped: uint8 (2 * HALF_BYTES,).
        freed: Carries a byte for each frame that was copied out, both ways; closed with this.
        outgoing: 0 or 1: the half that this end writes.

    Attributes:
        bytes_put: What frames that were put have saved the socket.
        bytes_taken: What frames that were taken have saved it.
    """

    def __init__(self, descriptor: int, memory: Bytes, freed: socket.socket, *, outgoing: int) -> None:
        halves = memory[:HALF_BYTES], memory[HALF_BYTES:]
        self._outgoing, self._incoming = halves[outgoing], halves[1 - outgoing]
        self._begin_bytes = outgoing * HALF_BYTES
        self._had_bytes = 0
        self._descriptor = descriptor
        self._freed = freed
        self._ring = Ring(HALF_BYTES)
        self._closed = False
        self.bytes_put = 0
        self.bytes_taken = 0

    def put(self, buffers: Sequence[Buffer]) -> int | None:
        """Copy a frame's tensors in; where they begin, or None if they had better go over the socket."""
        views = [flat_view(buffer) for buffer in buffers]
        total = sum(len(view) for view in views)
        if self._closed or not LEAST_BYTES <= total <= HALF_BYTES:
            return None
        self._reclaim()
        offset = self._ring.place(total)
        if offset is None:
            return None
        if not self._have(offset + total):
            self._ring.withdraw()
            return None
        at = offset
        for view in views:
            if view:
                self._outgoing[at : at + len(view)] = np.frombuffer(view, np.uint8)
                at += len(view)
        self.bytes_put += total - PLACE.size
        return offset

    def take(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy a frame's tensors out and let the sender use their room again.

        Raises:
            ProtocolError: They do not lie within the memory.
        """
        total = sum(len(buffer) for buffer in buffers)
        if offset + total > len(self._incoming):
            raise ProtocolError(
                f"a frame of {total} bytes at {offset} in shared memory; {len(self._incoming)} bytes are shared"
            )
        at = offset
        for buffer in buffers:
            if buffer:
                np.frombuffer(buffer, np.uint8)[:] = self._incoming[at : at + len(buffer)]
                at += len(buffer)
        self.bytes_taken += total - PLACE.size
        try:
            self._freed.send(b"\0", socket.MSG_DONTWAIT)
        except OSError as error:  # the peer is gone, or does not read: then it has no room any more
            _log.debug("a frame in shared memory could not be given back: %s", error)

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._outgoing = self._incoming = np.empty(0, np.uint8)  # the last reference unmaps it
        os.close(self._descriptor)
        self._freed.close()

    def _reclaim(self) -> None:
        try:
            self._ring.free(len(self._freed.recv(4096, socket.MSG_DONTWAIT)))
        except OSError:
            return  # nothing new; or the peer is gone, which the link notices

    def _have(self, end: int) -> bool:
        """Let the system provide the memory up to `end`: without, writing where it has none would kill the process."""
        if sys.platform != "linux":
            return False
        if end > self._had_bytes:
            try:
                os.posix_fallocate(self._descriptor, self._begin_bytes + self._had_bytes, end - self._had_bytes)
            except OSError as error:
                _log.debug("no more shared memory: %s", error)
                return False
            self._had_bytes = end
        return True


class DescriptorSocket(socket.socket):
    """A Unix socket that keeps the first descriptors that come with its bytes; others are dropped by the system."""

    _kept: tuple[int, ...] | None = None

    def take_descriptors(self) -> tuple[int, ...]:
        """Those that came; the caller closes them."""
        kept, self._kept = self._kept or (), ()
        return kept

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """What asyncio reads with."""
        if self._kept is not None or sys.platform != "linux":
            return super().recv_into(buffer, nbytes, flags)
        room = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
        count, messages, _, _ = self.recvmsg_into([buffer], room, flags | socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._kept = tuple(found)
        return count

    def close(self) -> None:
        """Also close the descriptors that nobody took."""
        for descriptor in self.take_descriptors():
            os.close(descriptor)
        super().close()


def knows_memory_files() -> bool:
    """Whether this is Linux with a Python that was built where memory files were known (glibc 2.27): not all are."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def make_memory(sock: socket.socket, note: bytes) -> SharedMemory | None:
    """New memory, passed to the peer with `note`, the frame that tells of it.

    Args:
        sock: A Unix socket on which nothing is waiting to be sent.
        note: Sent whole, or not at all.

    Returns:
        This end of it; None where that cannot be done.
    """
    if sys.platform != "linux" or not knows_memory_files() or sock.family != socket.AF_UNIX:
        return None
    with contextlib.ExitStack() as undo:
        try:
            descriptor = os.memfd_create("coterie", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, 2 * HALF_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            here, there = socket.socketpair()
            undo.callback(here.close)
            with there, sock.dup() as own:  # asyncio lends its socket for all but sending
                memory = SharedMemory(descriptor, _mapped(descriptor), here, outgoing=0)
                socket.send_fds(own, [note], [descriptor, there.fileno()])
        except OSError as error:
            _log.debug("no shared memory: %s", error)
            return None
        undo.pop_all()
    return memory


def open_memory(descriptors: tuple[int, ...]) -> SharedMemory | None:
    """The peer's memory; None if what it passed is no such thing, or if this system cannot map it."""
    try:
        if (fault := _fault(descriptors)) is None:
            descriptor, freed = descriptors
            return SharedMemory(descriptor, _mapped(descriptor), socket.socket(fileno=freed), outgoing=1)
    except OSError as error:
        fault = str(error)
    _log.debug("the peer's shared memory is not used: %s", fault)
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _fault(descriptors: tuple[int, ...]) -> str | None:
    if sys.platform != "linux" or not knows_memory_files():
        return "this Python knows no memory files"
    if len(descriptors) != _DESCRIPTORS:
        return f"{len(descriptors)} descriptors came with it"
    if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return "its owner could shrink it, and who reads what is gone is killed"
    size_bytes = os.fstat(descriptors[0]).st_size
    return None if size_bytes == 2 * HALF_BYTES else f"it has {size_bytes} bytes, not {2 * HALF_BYTES}"


def _mapped(descriptor: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, 2 * HALF_BYTES), np.uint8)
