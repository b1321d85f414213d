"""Dialling a coordinator: wrong addresses, wrong certificates, other versions, nobody there."""

import asyncio
import socket

import pytest

from coterie.errors import JoinRefusedError, NetworkError, VersionMismatchError
from coterie.transport.certificates import client_context, make_identity, server_context
from coterie.transport.connect import connect
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer, PeerInfo, ServedLink
from coterie.transport.wire import MAGIC, PREAMBLE, WIRE_VERSION


def test_candidates_that_do_not_answer_or_refuse_are_passed_over(bounded, join_of, echo) -> None:
    async def test() -> None:
        server = FrameServer(echo)
        await server.start("127.0.0.1")
        join = join_of(server, "127.0.0.9", "no-such-host.invalid", "127.0.0.1")
        link = await connect(join, timeout_s=30)
        await link.send(Frame(FrameHeader(kind="x", step=2)))
        assert (await link.receive()).header.step == 2
        await link.close()
        await server.close()

    bounded(test)


def test_a_candidate_that_accepts_and_stays_silent_is_given_up_after_the_timeout(bounded, not_sent) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.8", 0)) as silent:
            port = silent.getsockname()[1]
            join = JoinLink(hosts=("127.0.0.8", "127.0.0.9"), port=port, fingerprint="0" * 64, token=not_sent)
            with pytest.raises(NetworkError, match=r"127\.0\.0\.8: no answer within 0\.5 s; 127\.0\.0\.9: "):
                await connect(join, timeout_s=0.5)

    bounded(test)


def test_another_coordinator_at_the_address_is_refused_unless_a_later_candidate_is_the_right_one(
    bounded, join_of, echo
) -> None:
    async def test() -> None:
        right, impostor = FrameServer(echo), FrameServer(echo)
        await right.start("127.0.0.1")
        await impostor.start("127.0.0.7", right.port)
        link = await connect(join_of(right, "127.0.0.7", "127.0.0.1"))
        await link.close()
        with pytest.raises(JoinRefusedError, match="shows a certificate"):
            await connect(join_of(right, "127.0.0.7"))
        with pytest.raises(JoinRefusedError):
            await connect(join_of(right, fingerprint=make_identity().fingerprint))
        await right.close()
        await impostor.close()

    bounded(test)


def test_nothing_is_sent_to_a_server_with_the_wrong_certificate(bounded, join_of) -> None:
    async def test() -> None:
        received: list[int] = []

        async def note(link: ServedLink, _: PeerInfo) -> None:
            try:
                await link.receive()
            finally:
                received.append(link.bytes_received)

        server = FrameServer(note)
        await server.start("127.0.0.1")
        with pytest.raises(JoinRefusedError):
            await connect(join_of(server, fingerprint=make_identity().fingerprint))
        while not received:
            await asyncio.sleep(0.01)
        assert received == [0]
        await server.close()

    bounded(test)


def test_when_nobody_answers_the_message_says_what_each_address_did(bounded, not_sent) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        join = JoinLink(hosts=("127.0.0.1", "no-such-host.invalid"), port=port, fingerprint="0" * 64, token=not_sent)
        with pytest.raises(NetworkError, match=r"2 addresses: 127\.0\.0\.1: .*; no-such-host\.invalid: ") as caught:
            await connect(join)
        assert not_sent not in caught.value.message
        assert "firewall" in caught.value.hint

    bounded(test)


def test_a_server_of_another_protocol_version_is_named_as_such(bounded, not_sent) -> None:
    async def test() -> None:
        identity = make_identity()
        context = server_context(identity)
        context.set_alpn_protocols(["coterie/2"])

        async def ignore(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        listener = await asyncio.start_server(ignore, "127.0.0.1", 0, ssl=context)
        port = listener.sockets[0].getsockname()[1]
        join = JoinLink(hosts=("127.0.0.1",), port=port, fingerprint=identity.fingerprint, token=not_sent)
        with pytest.raises(VersionMismatchError, match="coterie/1"):
            await connect(join)
        listener.close()

    bounded(test)


def test_a_dead_first_candidate_does_not_hold_up_the_right_one(bounded, join_of, echo) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.9", 0)) as silent:  # the kernel takes connections, nobody answers
            server = FrameServer(echo)
            await server.start("127.0.0.1", silent.getsockname()[1])
            # The first would be waited for two minutes: longer than this test may take.
            link = await connect(join_of(server, "127.0.0.9", "127.0.0.1"), timeout_s=120)
            await link.close()
            await server.close()

    bounded(test)


def test_of_two_that_answer_the_earlier_candidate_is_taken_and_the_other_link_is_not_left_open(
    bounded, join_of, echo
) -> None:
    async def test() -> None:
        server = FrameServer(echo)
        await server.start("127.0.0.1")
        links = [await connect(join_of(server, "127.0.0.1", "localhost")) for _ in range(3)]
        assert len(server._links) == 3
        for link in links:
            await link.close()
        await server.close()

    bounded(test)


def test_two_ends_of_different_wire_formats_both_name_both(bounded, join_of) -> None:
    async def test() -> None:
        heard: list[str] = []

        async def take(link: ServedLink, _: PeerInfo) -> None:
            try:
                await link.receive()
            except VersionMismatchError as error:
                heard.append(error.message)
                raise

        server = FrameServer(take)
        await server.start("127.0.0.1")
        join = join_of(server)
        context = client_context()
        reader, writer = await asyncio.open_connection("127.0.0.1", join.port, ssl=context)
        writer.write(PREAMBLE.pack(MAGIC, WIRE_VERSION + 1, 0, 1, 0))
        answer = await reader.readexactly(PREAMBLE.size)
        assert PREAMBLE.unpack(answer)[:2] == (MAGIC, WIRE_VERSION)
        assert heard == [f"the peer speaks wire format {WIRE_VERSION + 1}, this side speaks {WIRE_VERSION}"]
        writer.close()
        await server.close()

    bounded(test)
