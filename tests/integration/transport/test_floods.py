"""Strangers who fill whatever is open to them: a device that comes meanwhile is let in, and memory stays bounded."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from coterie.errors import NetworkError
from coterie.transport import accepting
from coterie.transport import server as server_module
from coterie.transport.certificates import client_context
from coterie.transport.connect import connect
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.limits import Limits
from coterie.transport.server import UNREAD_BEFORE_ACCEPT_BYTES, FrameServer, PeerInfo, ServedLink
from coterie.transport.stream_link import MAX_UNREAD_BYTES
from coterie.transport.wire import frame_head


async def stay(link: ServedLink, _: PeerInfo) -> None:
    """Take a hello that never comes."""
    await link.receive()


async def closes(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


def test_of_too_many_peers_that_wait_to_be_let_in_the_oldest_is_dropped(monkeypatch, bounded, join_of) -> None:
    monkeypatch.setattr(server_module, "MAX_WAITING_LINKS", 2)

    async def test() -> None:
        server = FrameServer(stay)
        await server.start("127.0.0.1")
        links = [await connect(join_of(server)) for _ in range(3)]
        with pytest.raises(NetworkError):
            await links[0].receive()
        assert [link.is_closed for link in links] == [True, False, False]
        for link in links:
            await link.close()
        await server.close()

    bounded(test)


def test_connections_that_never_finish_their_handshake_keep_no_device_out(monkeypatch, bounded, join_of, echo) -> None:
    monkeypatch.setattr(accepting, "MAX_HANDSHAKES", 3)

    async def test() -> None:
        server = FrameServer(echo)
        await server.start("127.0.0.1")
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(7)]
        link = await connect(join_of(server))
        await link.send(Frame(FrameHeader(kind="x")))
        assert (await link.receive()).header.kind == "x"
        assert all([await closes(reader) for reader, _ in idle[:4]])
        await link.close()
        for _, writer in idle:
            writer.close()
        await server.close()

    bounded(test)


def test_web_connections_that_say_nothing_keep_no_browser_out(monkeypatch, bounded, echo) -> None:
    monkeypatch.setattr(server_module, "MAX_WEB_CONNECTIONS", 2)

    async def test() -> None:
        async def front(_: web.Request) -> web.Response:
            return web.Response(text="here")

        app = web.Application()
        app.router.add_get("/", front)
        server = FrameServer(echo, app=app)
        await server.start("127.0.0.1")
        context = client_context()
        context.set_alpn_protocols(["http/1.1"])
        open_ones = [await asyncio.open_connection("127.0.0.1", server.port, ssl=context) for _ in range(4)]
        assert all([await closes(reader) for reader, _ in open_ones[:2]])
        reader, writer = open_ones[-1]
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert b"here" in await reader.read()
        for _, other in open_ones:
            other.close()
        await server.close()

    bounded(test)


class PausableTransport(asyncio.Transport):
    """What a flood comes through: says whether the link still wants more."""

    wants_more = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.wants_more = False

    def resume_reading(self) -> None:
        self.wants_more = True

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("accepted", [False, True], ids=["before the hello", "of a member"])
def test_a_flood_of_small_frames_that_nobody_reads_stops_at_the_senders_side(bounded, *, accepted: bool) -> None:
    most_bytes = MAX_UNREAD_BYTES if accepted else UNREAD_BEFORE_ACCEPT_BYTES
    content = frame_head(Frame(FrameHeader(kind="control", body=bytes(200))), Limits())

    async def test() -> None:
        link, transport = ServedLink(lambda _lost: None), PausableTransport()
        link.connection_made(transport)
        if accepted:
            link.accept()
        while transport.wants_more:
            assert link.bytes_received <= most_bytes
            for at in range(len(content)):
                link.get_buffer(1)[:1] = content[at : at + 1]
                link.buffer_updated(1)
        while not transport.wants_more:
            assert len((await link.receive()).header.body) == 200
        link.abort()

    bounded(test)
