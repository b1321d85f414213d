"""A run that is announced on this machine is found, and joined only by who knows its token."""

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web

from coterie.coordinator.door import Door
from coterie.coordinator.pairing import answer_pairings
from coterie.errors import JoinRefusedError, NetworkError
from coterie.transport.discovery import FoundRun, announced, find_runs
from coterie.transport.pairing import PairRequest, answer_pairing, pair, proof_of
from coterie.transport.server import FrameServer

LOOPBACK = ("127.0.0.1",)


@pytest.fixture
def multicast() -> None:
    """Skips where loopback carries no multicast."""
    pytest.importorskip("zeroconf", reason="the extra `discovery` is not installed")
    group = ("224.0.0.251", 5353)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        try:
            sender.sendto(b"", group)
        except OSError as error:
            pytest.skip(f"loopback carries no multicast here: {error}")


async def nobody(_link, _peer) -> None:
    """Serves no frames."""


@contextlib.asynccontextmanager
async def coordinator(door):
    app = web.Application()
    answer_pairings(app, door)
    server = FrameServer(nobody, app=app, identity=door.certificate)
    await server.start("127.0.0.1")
    try:
        yield FoundRun(run="run-1", hosts=LOOPBACK, port=server.port, fingerprint_prefix=server.fingerprint[:16])
    finally:
        await server.close()


@pytest.mark.usefixtures("multicast")
def test_an_announced_run_is_found_with_no_more_than_is_public(bounded) -> None:
    async def test() -> None:
        fingerprint = "0123456789abcdef" * 4
        async with announced("run-1", 4711, fingerprint, ("127.0.0.1", "fd00::2"), interfaces=LOOPBACK):
            found = ()
            while not found:  # a busy machine answers late
                found = await find_runs(2.0, interfaces=LOOPBACK)
        (run,) = found
        assert (run.run, run.port, run.fingerprint_prefix) == ("run-1", 4711, "0123456789abcdef")
        assert set(run.hosts) == {"127.0.0.1", "fd00::2"}

    bounded(test)


def test_who_knows_the_token_gets_the_whole_join_link(bounded) -> None:
    async def test() -> None:
        door = Door()
        token = door.issue()
        async with coordinator(door) as found:
            join = await asyncio.to_thread(pair, found, token)
            assert join.to_text() == f"coterie://127.0.0.1:{found.port}/?fp={door.fingerprint}#{token}"
            with pytest.raises(JoinRefusedError, match=r"who answers for run run-1 at .* does not know"):
                await asyncio.to_thread(pair, found, token[:-1])

    bounded(test)


def test_an_impostor_gets_neither_the_token_nor_a_worker(bounded) -> None:
    async def test() -> None:
        door, impostor = Door(), Door()
        token = door.issue()
        seen = []

        async def relay(request: web.Request) -> web.Response:
            """Asks the real coordinator with what the worker said, and passes its answer on."""
            asked = await request.json()
            seen.append(asked)
            answer = answer_pairing(door.told_tokens, door.fingerprint, PairRequest(**asked))
            return web.json_response({"proof": answer.proof if answer else "00" * 32})

        app = web.Application()
        app.router.add_post("/pair", relay)
        server = FrameServer(nobody, app=app, identity=impostor.certificate)
        await server.start("127.0.0.1")
        found = FoundRun(run="run-1", hosts=LOOPBACK, port=server.port, fingerprint_prefix=door.fingerprint[:16])
        with pytest.raises(JoinRefusedError, match="does not know the join token"):
            await asyncio.to_thread(pair, found, token)
        assert token not in str(seen)
        assert answer_pairing(door.told_tokens, door.fingerprint, PairRequest(**seen[0])) is None
        await server.close()

    bounded(test)


def test_a_worker_that_is_told_its_own_proof_back_is_not_fooled() -> None:
    digest, fingerprint, nonce = "ab" * 32, "cd" * 32, "n"
    assert proof_of(digest, "worker", fingerprint, nonce) != proof_of(digest, "coordinator", fingerprint, nonce)


def test_tokens_of_the_coordinators_own_workers_pair_nobody() -> None:
    door = Door()
    door.issue(own=True)
    assert door.told_tokens == ()


def test_a_run_that_nobody_answers_for_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NetworkError, match="run-1 is announced, and nobody answers"):
        pair(FoundRun(run="run-1", hosts=LOOPBACK, port=port, fingerprint_prefix="0" * 16), "token")


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1", b'{"nonce": 1, "proof": 2}', b'{"nonce": "n", "proof": "\\ud800"}']
)
def test_what_is_no_pairing_is_refused(bounded, body: bytes) -> None:
    async def test() -> None:
        from aiohttp import ClientSession, TCPConnector  # noqa: PLC0415

        door = Door()
        door.issue()
        async with (
            coordinator(door) as found,
            ClientSession(connector=TCPConnector(ssl=False)) as client,
            client.post(f"https://127.0.0.1:{found.port}/pair", data=body) as answer,
        ):
            assert answer.status in (400, 403)

    bounded(test)
