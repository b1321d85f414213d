"""The server's one port: HTTP and frames side by side, who is let in, and how it goes away."""

import asyncio
import contextlib
import socket
import ssl
import stat

import pytest
from aiohttp import ClientSession, Fingerprint, web

from coterie.errors import JoinRefusedError, NetworkError, ProtocolError
from coterie.transport.certificates import client_context
from coterie.transport.connect import connect, connect_unix
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.server import FrameServer, PeerInfo, ServedLink
from coterie.transport.socket_options import KEEPALIVE_IDLE_S


def hello_app() -> web.Application:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    return app


def test_http_and_frames_share_the_port_at_the_same_time(bounded, join_of, echo) -> None:
    async def test() -> None:
        server = FrameServer(echo, app=hello_app())
        await server.start("127.0.0.1")
        link = await connect(join_of(server))
        async with ClientSession() as session:
            for step in range(3):
                await link.send(Frame(FrameHeader(kind="x", step=step)))
                async with session.get(f"https://127.0.0.1:{server.port}/", ssl=False) as response:
                    assert await response.text() == "hello"
                assert (await link.receive()).header.step == step
            pin = bytes.fromhex(server.fingerprint)
            async with session.get(f"https://127.0.0.1:{server.port}/", ssl=Fingerprint(pin)) as response:
                assert response.status == 200
        await link.close()
        await server.close()

    bounded(test)


def test_a_server_without_pages_closes_http_connections_and_serves_frames(bounded, join_of, echo) -> None:
    async def test() -> None:
        server = FrameServer(echo)
        await server.start("127.0.0.1")
        context = client_context()
        context.set_alpn_protocols(["http/1.1"])
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        link = await connect(join_of(server))
        await link.send(Frame(FrameHeader(kind="x")))
        await link.receive()
        await link.close()
        await server.close()

    bounded(test)


def test_a_peer_that_does_not_speak_tls_gets_nothing_and_disturbs_nobody(bounded, join_of, echo) -> None:
    async def test() -> None:
        server = FrameServer(echo)
        await server.start("127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await reader.read()
        writer.close()
        link = await connect(join_of(server))
        await link.send(Frame(FrameHeader(kind="x")))
        await link.receive()
        await link.close()
        await server.close()

    bounded(test)


def test_a_link_that_is_not_accepted_in_time_is_dropped(bounded, join_of) -> None:
    async def test() -> None:
        errors: list[str] = []

        async def never_accept(link: ServedLink, _: PeerInfo) -> None:
            try:
                await link.receive()
            except NetworkError as error:
                errors.append(error.message)

        server = FrameServer(never_accept, accept_timeout_s=0.05)
        await server.start("127.0.0.1")
        link = await connect(join_of(server))
        with pytest.raises(NetworkError):
            await link.receive()
        assert errors == ["the peer was not let in within 0.05 s"]
        await link.close()
        await server.close()

    bounded(test)


def test_an_accepted_link_outlives_that_time(bounded, join_of, echo) -> None:
    async def test() -> None:
        server = FrameServer(echo, accept_timeout_s=0.05)
        await server.start("127.0.0.1")
        link = await connect(join_of(server))
        await asyncio.sleep(0.15)
        await link.send(Frame(FrameHeader(kind="x", step=4)))
        assert (await link.receive()).header.step == 4
        await link.close()
        await server.close()

    bounded(test)


def test_before_it_is_accepted_a_peer_can_send_a_hello_and_nothing_large(bounded, join_of) -> None:
    async def test() -> None:
        outcomes: asyncio.Queue[object] = asyncio.Queue()

        async def hello_only(link: ServedLink, _: PeerInfo) -> None:
            try:
                while True:
                    outcomes.put_nowait((await link.receive()).header.kind)
            except ProtocolError as error:
                outcomes.put_nowait(error)

        server = FrameServer(hello_only)
        await server.start("127.0.0.1")
        link = await connect(join_of(server))
        await link.send(Frame(FrameHeader(kind="hello", body=bytes(1000))))
        assert await outcomes.get() == "hello"
        await link.send(Frame(FrameHeader(kind="flood", body=bytes(100_000))))
        error = await outcomes.get()
        assert isinstance(error, ProtocolError)
        assert "64.0 KiB are allowed here" in error.message
        await link.close()
        await server.close()

    bounded(test)


def test_closing_frees_the_port_at_once_though_peers_are_still_connected(bounded, join_of, echo) -> None:
    async def test() -> None:
        port = 0
        for _ in range(3):
            server = FrameServer(echo, app=hello_app())
            await server.start("127.0.0.1", port)
            port = server.port
            link = await connect(join_of(server))
            async with ClientSession() as session:
                async with session.get(f"https://127.0.0.1:{port}/", ssl=False) as response:
                    await response.text()
                await server.close()  # `bounded` ends one that waits for its peers, as aiohttp does for a minute
            with pytest.raises(NetworkError):
                await link.receive()
            await link.close()
            await server.close()

    bounded(test)


def test_a_taken_port_is_named_with_a_hint(bounded, echo) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = FrameServer(echo)
            with pytest.raises(NetworkError, match=f"127.0.0.1 port {port}") as caught:
                await server.start("127.0.0.1", port)
            assert "another port" in caught.value.hint

    bounded(test)


def test_an_address_of_another_machine_cannot_be_listened_on(bounded, echo) -> None:
    async def test() -> None:
        with pytest.raises(NetworkError, match=r"192\.0\.2\.77"):
            await FrameServer(echo).start("192.0.2.77")

    bounded(test)


def test_without_a_host_one_port_serves_ipv4_and_if_there_is_any_ipv6(bounded, join_of, echo) -> None:
    async def test() -> None:
        peers: list[PeerInfo] = []

        async def note(link: ServedLink, peer: PeerInfo) -> None:
            peers.append(peer)
            await echo(link, peer)

        server = FrameServer(note)
        await server.start()
        hosts = ["127.0.0.1"] + (["::1"] if socket.has_dualstack_ipv6() else [])
        for host in hosts:
            link = await connect(join_of(server, host))
            await link.send(Frame(FrameHeader(kind="x")))
            await link.receive()
            await link.close()
        assert [peer.address for peer in peers] == hosts
        assert {peer.carrier for peer in peers} == {"tls"}
        await server.close()

    bounded(test)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this platform has no Unix sockets")
def test_the_unix_socket_lies_in_a_private_folder_that_goes_away(bounded, echo) -> None:
    async def test() -> None:
        server = FrameServer(echo)
        await server.start("127.0.0.1")
        path = server.unix_path
        assert path is not None
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        link = await connect_unix(path)
        await link.close()
        await server.close()
        assert not path.parent.exists()
        with pytest.raises(NetworkError, match="no listener"):
            await connect_unix(path)

    bounded(test)


def test_an_error_of_the_handler_closes_its_link(bounded, join_of) -> None:
    async def test() -> None:
        async def refuse(_link: ServedLink, _peer: PeerInfo) -> None:
            raise JoinRefusedError("no")

        server = FrameServer(refuse)
        await server.start("127.0.0.1")
        link = await connect(join_of(server))
        with pytest.raises(NetworkError):
            await link.receive()
        await link.close()
        await server.close()

    bounded(test)


def test_links_over_tcp_notice_a_dead_peer_by_keepalive(bounded, join_of, echo) -> None:
    async def test() -> None:
        served: list[ServedLink] = []

        async def note(link: ServedLink, _: PeerInfo) -> None:
            served.append(link)
            await echo(link, _)

        server = FrameServer(note)
        await server.start("127.0.0.1")
        link = await connect(join_of(server))
        await link.send(Frame(FrameHeader(kind="x")))
        await link.receive()
        for end in (link, served[0]):
            assert end._transport is not None
            sock = end._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_KEEPIDLE"):
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_IDLE_S
            assert isinstance(end._transport.get_extra_info("ssl_object"), ssl.SSLObject)
        await link.close()
        await server.close()

    bounded(test)
