"""The shaping carrier: a TCP relay between each host and what it dials, which can be slowed, cut and mended. No root.

    python relay_process.py

Reads commands from standard input and answers each, one JSON object a line:

    {"do": "open", "line": "phone", "target": ["127.0.0.1", 4433]}            -> {"port": 41234}
    {"do": "shape", "line": "phone", "bytes_per_s": 625000, "latency_s": 0.02} -> {}
    {"do": "cut", "line": "phone", "how": "silent"}                           -> {}
    {"do": "restore", "line": "phone"}                                        -> {}
    {"do": "moved", "line": "phone"}                                          -> {"up_bytes": 1, "down_bytes": 2}

`silent` is a half-open connection: no byte passes, nobody is told, and a new connection is taken and never answered.
What was under way goes on after `restore`, as TCP's own repeats would make it. `closed` ends every connection and
refuses new ones. Rate and latency hold for each direction apart, and for all connections of a line together.
"""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Iterator

CHUNK_BYTES = 16 * 1024
"""Read at a time: at 5 Mbit/s one takes 26 ms, so a heartbeat does not wait long behind it."""
QUEUE_S = 0.1
"""What a line's buffer holds before it takes no more, in seconds of its rate: a home router's, not a bloated one's."""
QUEUE_CHUNKS = 1024
SOCKET_BYTES = 256 * 1024
"""Kernel buffers stay small, else a cut or slowed line would go on for megabytes."""
BACKLOG = 64


class Way:
    """One direction of a line: when the next byte may leave."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.latency_s = 0.0
        self.moved_bytes = 0
        self._free_s = 0.0

    def take(self, count: int, now_s: float) -> float:
        """Account for `count` bytes; when they have arrived."""
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + (count / self.bytes_per_s if self.bytes_per_s else 0.0)
        return self._free_s + self.latency_s

    def wait_s(self, now_s: float) -> float:
        """How long to read nothing, since the line's buffer is full."""
        return self._free_s - now_s - QUEUE_S


class Line:
    """What lies between one host and what it dials."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.up, self.down = Way(), Way()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        """Open the port: a free one the first time, the same one afterwards."""
        if self._server is not None:
            return
        listener = _small_socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self._server = await asyncio.start_server(self._carry, sock=listener, limit=CHUNK_BYTES, backlog=BACKLOG)
        self.port = listener.getsockname()[1]

    def close(self) -> None:
        """End every connection, refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._kept(writer), contextlib.suppress(OSError):
            await self.flowing.wait()
            outgoing = _small_socket()
            outgoing.setblocking(False)
            await asyncio.get_running_loop().sock_connect(outgoing, self.target)
            far_reader, far_writer = await asyncio.open_connection(sock=outgoing, limit=CHUNK_BYTES)
            with self._kept(far_writer):
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(reader, far_writer, self.up))
                    both.create_task(self._pump(far_reader, writer, self.down))

    @contextlib.contextmanager
    def _kept(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort() if self._server is None else writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        """Pass one direction on until its sender ends it, then end it for the receiver."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE_CHUNKS)
        delivery = asyncio.create_task(self._deliver(queue, writer))
        clock = asyncio.get_running_loop()
        data = b"-"
        while data:
            with contextlib.suppress(TimeoutError):
                await asyncio.sleep(max(0.0, way.wait_s(clock.time())))
            await self.flowing.wait()
            try:
                data = await reader.read(CHUNK_BYTES)
            except ConnectionError:
                data = b""  # a reset goes on as an end
            await self.flowing.wait()  # the read may have waited from before a cut: what it got has not passed yet
            way.moved_bytes += len(data)
            await queue.put((way.take(len(data), clock.time()), data))
        await delivery

    async def _deliver(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop()
        while True:
            due_s, data = await queue.get()
            if (early_s := due_s - clock.time()) > 0:
                await asyncio.sleep(early_s)
            await self.flowing.wait()
            if not data:
                writer.close()
                return
            with contextlib.suppress(ConnectionError):  # nobody takes it any more; the sender hears by its own end
                writer.write(data)
                await writer.drain()


class Relay:
    """All lines, and what is asked for them."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    async def answer(self, wish: dict[str, object]) -> dict[str, object]:
        """Do one command."""
        name = str(wish["line"])
        match wish:
            case {"do": "open", "target": [str(host), int(port)]}:
                line = self._lines.setdefault(name, Line((host, port)))
                line.target = (host, port)
                await line.listen()
                return {"port": line.port}
            case {"do": "shape", "bytes_per_s": int() | float() as rate, "latency_s": int() | float() as latency}:
                for way in (self._lines[name].up, self._lines[name].down):
                    way.bytes_per_s, way.latency_s = float(rate), float(latency)
            case {"do": "cut", "how": "silent"}:
                self._lines[name].flowing.clear()
            case {"do": "cut", "how": "closed"}:
                self._lines[name].close()
            case {"do": "restore"}:
                self._lines[name].flowing.set()
                await self._lines[name].listen()
            case {"do": "moved"}:
                line = self._lines[name]
                return {"up_bytes": line.up.moved_bytes, "down_bytes": line.down.moved_bytes}
            case _:
                raise ValueError(f"the relay knows no {wish}")
        return {}


def _small_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


async def main() -> None:
    """Answer until standard input ends: with the program that started this one."""
    relay = Relay()
    wishes = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(wishes), sys.stdin)
    while text := await wishes.readline():
        print(json.dumps(await relay.answer(json.loads(text))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
