"""The two programs that `links.py` starts: a receiver and a sender, each in a process of its own.

    python link_processes.py receive KIND HOST FRAMES
    python link_processes.py send KIND HOST FRAMES PORT FINGERPRINT RATE

KIND is `frames` or `socket` (a plain blocking socket, the same frame bytes), with `-tls` for TLS. RATE in bytes per
second paces the sender; 0 does not. The receiver prints its port, then its CPU per frame; both print JSON lines.
"""

import asyncio
import json
import socket
import sys
import time

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
        self.per_frame_s: list[float] = []

    def frame_done(self) -> None:
        """Take the CPU since the last frame."""
        now_s = time.process_time()
        self.per_frame_s.append(now_s - self._last_s)
        self._last_s = now_s


# ---- receivers


async def receive_frames(*, tls: bool, host: str, frames: int) -> None:
    finished = asyncio.Event()
    meter = CpuMeter()

    async def on_link(link: StreamLink, _: PeerInfo) -> None:
        if isinstance(link, ServedLink):
            link.accept()
        for _ in range(frames):
            received = await link.receive()
            assert received.payload_bytes == FRAME_BYTES
            meter.frame_done()
            await link.send(Frame(FrameHeader(kind="ack")))
        await link.flush()
        finished.set()

    if tls:
        server = FrameServer(on_link)
        await server.start(host)
        say(port=server.port, fingerprint=server.fingerprint)
        await finished.wait()
        say(cpu_s=meter.per_frame_s)
        await server.close()
        return
    links: list[StreamLink] = []
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: links.append(StreamLink()) or links[-1], host, 0)
    say(port=listener.sockets[0].getsockname()[1], fingerprint="")
    while not links:
        await asyncio.sleep(0.01)
    await on_link(links[0], PeerInfo(carrier="plain"))
    say(cpu_s=meter.per_frame_s)
    await links[0].close()
    listener.close()


def receive_socket(*, tls: bool, host: str, frames: int) -> None:
    head_bytes = len(frame_head(frame(), Limits()))
    identity = make_identity()
    with socket.create_server((host, 0)) as listener:
        say(port=listener.getsockname()[1], fingerprint=identity.fingerprint)
        connection, _ = listener.accept()
        if tls:
            connection = server_context(identity).wrap_socket(connection, server_side=True)
        meter = CpuMeter()
        with connection:
            for _ in range(frames):
                read_exactly(connection, head_bytes)
                read_exactly(connection, FRAME_BYTES)
                meter.frame_done()
                connection.sendall(ACK)
            say(cpu_s=meter.per_frame_s)
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


# ---- senders: each prints the seconds that every frame took from its first byte to its acknowledgement


async def send_frames(*, tls: bool, host: str, frames: int, port: int, fingerprint: str) -> None:
    if tls:
        link = await connect(JoinLink(hosts=(host,), port=port, fingerprint=fingerprint, token="unused"))  # noqa: S106 - none
    else:
        link = await connect_plain(host, port)
    content = frame()
    times_s = []
    for _ in range(frames):
        begin_s = time.perf_counter()
        await link.send(content)
        await link.receive()
        times_s.append(time.perf_counter() - begin_s)
    say(frame_s=times_s)
    await link.close()


def send_socket(*, tls: bool, host: str, frames: int, port: int, rate: float, answer_bytes: int) -> None:
    """Write frames on a blocking socket, paced to `rate` bytes/s unless it is 0."""
    content = frame()
    data = memoryview(frame_head(content, Limits()) + bytes(content.buffers[0]))
    connection = socket.create_connection((host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls:
        connection = client_context().wrap_socket(connection)
    times_s = []
    with connection:
        for _ in range(frames):
            begin_s = time.perf_counter()
            if rate:
                for start in range(0, len(data), PACE_BYTES):
                    connection.sendall(data[start : start + PACE_BYTES])
                    time.sleep(max(0.0, begin_s + start / rate - time.perf_counter()))
            else:
                connection.sendall(data)
            read_exactly(connection, answer_bytes)
            times_s.append(time.perf_counter() - begin_s)
        say(frame_s=times_s)


def main(arguments: list[str]) -> None:
    role, kind, host, frames, *rest = arguments
    tls = kind.endswith("-tls")
    if role == "receive":
        if kind.startswith("frames"):
            asyncio.run(receive_frames(tls=tls, host=host, frames=int(frames)))
        else:
            receive_socket(tls=tls, host=host, frames=int(frames))
        return
    port, fingerprint, rate = int(rest[0]), rest[1], float(rest[2])
    if kind.startswith("frames") and not rate:
        asyncio.run(send_frames(tls=tls, host=host, frames=int(frames), port=port, fingerprint=fingerprint))
        return
    answer_bytes = len(frame_head(Frame(FrameHeader(kind="ack")), Limits())) if kind.startswith("frames") else len(ACK)
    send_socket(tls=tls, host=host, frames=int(frames), port=port, rate=rate, answer_bytes=answer_bytes)


if __name__ == "__main__":
    main(sys.argv[1:])
