"""The two programs that `links.py` starts: a receiver and a sender, each in a process of its own.

    python link_processes.py receive KIND HOST FRAMES ACKS
    python link_processes.py send KIND HOST FRAMES ACKS PORT FINGERPRINT RATE

KIND is `frames` or `socket` (a plain blocking socket, the same frame bytes), with `-tls` for TLS. ACKS is `each` or
`ends`: whether every frame is acknowledged before the next is sent, or only the first (which warms up) and the last.
RATE in bytes per second paces the sender; 0 does not. The receiver prints its port, then its CPU seconds per frame
after the first; the sender the wall seconds from the first frame's acknowledgement to the last one's. All in JSON.
"""

import asyncio
import json
import socket
import sys
import time

import msgspec
import numpy as np

from coterie.transport.certificates import client_context, make_identity, server_context
from coterie.transport.connect import connect, connect_plain
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.join_link import JoinLink
from coterie.transport.limits import Limits
from coterie.transport.server import FrameServer, PeerInfo, ServedLink
from coterie.transport.stream_link import StreamLink
from coterie.transport.wire import frame_head
from coterie.units import MIB

FRAME_BYTES = 8 * MIB
ACK = b"acknowledged"
PACE_BYTES = 16 * 1024


def frame() -> Frame:
    values = np.random.default_rng(0).integers(0, 255, FRAME_BYTES, np.uint8)
    spec = TensorSpec(name="hidden", dtype="float32", shape=(FRAME_BYTES // 4096, 1024), nbytes=FRAME_BYTES)
    return Frame(FrameHeader(kind="hidden", tensors=(spec,)), [values.data])


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


class CpuMeter:
    """This process's CPU seconds between one frame's end and the next one's."""

    def __init__(self) -> None:
        self._last_s = time.process_time()
        self._per_frame_s: list[float] = []

    def frame_done(self) -> None:
        """Take the CPU since the last frame."""
        now_s = time.process_time()
        self._per_frame_s.append(now_s - self._last_s)
        self._last_s = now_s

    def say(self) -> None:
        """Print all but the first frame's."""
        say(cpu_s=self._per_frame_s[1:])


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    tls: bool
    host: str
    frames: int
    ack_each: bool
    port: int = 0
    fingerprint: str = ""
    rate: float = 0.0

    def is_acknowledged(self, index: int) -> bool:
        """Whether frame `index` is answered."""
        return self.ack_each or index in (0, self.frames - 1)


# ---- receivers


async def receive_frames(job: Job) -> None:
    finished = asyncio.Event()
    meter = CpuMeter()

    async def on_link(link: StreamLink, _: PeerInfo) -> None:
        if isinstance(link, ServedLink):
            link.accept()
        for index in range(job.frames):
            received = await link.receive()
            assert received.payload_bytes == FRAME_BYTES
            meter.frame_done()
            if job.is_acknowledged(index):
                await link.send(Frame(FrameHeader(kind="ack")))
        await link.flush()
        finished.set()

    if job.tls:
        server = FrameServer(on_link)
        await server.start(job.host)
        say(port=server.port, fingerprint=server.fingerprint)
        await finished.wait()
        meter.say()
        await server.close()
        return
    links: list[StreamLink] = []

    def take_link() -> StreamLink:
        links.append(StreamLink())
        return links[-1]

    listener = await asyncio.get_running_loop().create_server(take_link, job.host, 0)
    say(port=listener.sockets[0].getsockname()[1], fingerprint="")
    while not links:
        await asyncio.sleep(0.01)
    await on_link(links[0], PeerInfo(carrier="plain"))
    meter.say()
    await links[0].close()
    listener.close()


def receive_socket(job: Job) -> None:
    head_bytes = len(frame_head(frame(), Limits()))
    identity = make_identity()
    with socket.create_server((job.host, 0)) as listener:
        say(port=listener.getsockname()[1], fingerprint=identity.fingerprint)
        connection, _ = listener.accept()
        if job.tls:
            connection = server_context(identity).wrap_socket(connection, server_side=True)
        meter = CpuMeter()
        with connection:
            for index in range(job.frames):
                read_exactly(connection, head_bytes)
                read_exactly(connection, FRAME_BYTES)
                meter.frame_done()
                if job.is_acknowledged(index):
                    connection.sendall(ACK)
            meter.say()
            connection.recv(1)


def read_exactly(connection: socket.socket, size: int) -> memoryview:
    view = np.empty(size, np.uint8).data
    got = 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            raise EOFError("the sender closed early")
        got += count
    return view


# ---- senders


async def send_frames(job: Job) -> None:
    if job.tls:
        link = await connect(
            JoinLink(hosts=(job.host,), port=job.port, fingerprint=job.fingerprint, token="unused"), timeout_s=30
        )
    else:
        link = await connect_plain(job.host, job.port)
    content = frame()
    begin_s = 0.0
    for index in range(job.frames):
        await link.send(content)
        if job.is_acknowledged(index):
            await link.receive()
        begin_s = begin_s or time.perf_counter()
    say(wall_s=time.perf_counter() - begin_s)
    await link.close()


def send_socket(job: Job, answer_bytes: int) -> None:
    content = frame()
    data = memoryview(frame_head(content, Limits()) + bytes(content.buffers[0]))
    connection = socket.create_connection((job.host, job.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if job.tls:
        connection = client_context().wrap_socket(connection)
    begin_s = 0.0
    with connection:
        for index in range(job.frames):
            write(connection, data, job.rate)
            if job.is_acknowledged(index):
                read_exactly(connection, answer_bytes)
            begin_s = begin_s or time.perf_counter()
        say(wall_s=time.perf_counter() - begin_s)


def write(connection: socket.socket, data: memoryview, rate: float) -> None:
    """Write everything, at `rate` bytes/s unless it is 0."""
    if not rate:
        connection.sendall(data)
        return
    begin_s = time.perf_counter()
    for start in range(0, len(data), PACE_BYTES):
        connection.sendall(data[start : start + PACE_BYTES])
        time.sleep(max(0.0, begin_s + start / rate - time.perf_counter()))


def main(arguments: list[str]) -> None:
    role, kind, host, frames, acks, *rest = arguments
    is_frames, tls = kind.startswith("frames"), kind.endswith("-tls")
    job = Job(tls=tls, host=host, frames=int(frames), ack_each=acks == "each")
    if role == "receive":
        if is_frames:
            asyncio.run(receive_frames(job))
        else:
            receive_socket(job)
        return
    job = msgspec.structs.replace(job, port=int(rest[0]), fingerprint=rest[1], rate=float(rest[2]))
    if is_frames and not job.rate:
        asyncio.run(send_frames(job))
        return
    send_socket(job, len(frame_head(Frame(FrameHeader(kind="ack")), Limits())) if is_frames else len(ACK))


if __name__ == "__main__":
    main(sys.argv[1:])
