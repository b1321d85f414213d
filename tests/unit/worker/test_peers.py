"""Direct links between workers: whom they let in, which address they take, and what they fall back from."""

import asyncio

import pytest

from coterie.cluster.messages import PeerAddress, PeerHello, control
from coterie.errors import NetworkError
from coterie.ids import RunId, WorkerId
from coterie.transport.connect import connect
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.join_link import JoinLink
from coterie.transport.server import FrameServer
from coterie.transport.shared_memory import knows_memory_files
from coterie.worker import peers as peers_module
from coterie.worker.peers import Peers

RUN, TOKEN = RunId("run"), "peers-know-this"
A, B = WorkerId("a"), WorkerId("b")


class Device:
    """One worker's share in direct links."""

    def __init__(self, worker, host_id):
        self.worker, self.host_id = worker, host_id
        self.frames, self.lost = [], []
        self.peers = Peers(self.frames.append, lambda peer, _error: self.lost.append(peer), host_id)
        self.peers.expect(RUN, TOKEN)
        self.server = FrameServer(self.peers.serve)

    def address(self, hosts=("127.0.0.1",), unix=True):
        return PeerAddress(
            worker=self.worker,
            host_id=self.host_id,
            hosts=hosts,
            port=self.server.port,
            fingerprint=self.server.fingerprint,
            unix_path=str(self.server.unix_path) if unix else "",
        )

    async def close(self):
        await self.peers.close()
        await self.server.close()


def between(test, hosts=("here", "here")):
    """Run `test(a, b)` with two devices that listen."""

    async def bounded():
        async with asyncio.timeout(60):
            devices = [Device(worker, host) for worker, host in zip((A, B), hosts, strict=True)]
            for device in devices:
                await device.server.start("127.0.0.1")
            try:
                await test(*devices)
            finally:
                for device in devices:
                    await device.close()

    asyncio.run(bounded())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_workers_of_one_machine_meet_at_a_unix_socket_and_both_ends_can_send():
    async def test(a, b):
        there, back = await a.peers.dial(b.address(), A)
        assert (there.source, there.target, back.source, back.target) == (A, B, B, A)
        assert min(there.bytes_per_s, back.bytes_per_s) > 0
        assert a.peers.carriers == {B: "unix"}
        assert b.peers.carriers == {A: "unix"}
        await a.peers.links[B].send(Frame(FrameHeader(kind="hidden", step=1)))
        await b.peers.links[A].send(Frame(FrameHeader(kind="gradient", step=2)))
        await until(lambda: a.frames and b.frames)
        assert (a.frames[0].header.step, b.frames[0].header.step) == (2, 1)

    between(test)


@pytest.mark.skipif(not knows_memory_files(), reason="only Linux has anonymous memory files")
def test_workers_that_met_at_a_unix_socket_share_memory_once_the_link_is_measured():
    async def test(a, b):
        await a.peers.dial(b.address(), A)
        here, there = a.peers.links[B], b.peers.links[A]
        await until(lambda: here.shares_memory and there.shares_memory)
        data = bytes(range(256)) * 4096
        spec = TensorSpec(name="x", dtype="uint8", shape=(len(data),), nbytes=len(data))
        await here.send(Frame(FrameHeader(kind="hidden", tensors=(spec,)), (data,)))
        await there.send(Frame(FrameHeader(kind="gradient", tensors=(spec,)), (data,)))
        await until(lambda: a.frames and b.frames)
        assert bytes(a.frames[0].buffers[0]) == bytes(b.frames[0].buffers[0]) == data

    between(test)


def test_workers_of_two_machines_meet_at_the_first_address_that_answers_with_the_right_certificate():
    async def test(a, b):
        impostor = FrameServer(a.peers.serve)
        await impostor.start("127.0.0.6", b.server.port)
        await a.peers.dial(b.address(hosts=("127.0.0.9", "127.0.0.6", "127.0.0.1")), A)
        assert a.peers.carriers == {B: "tls"}
        await impostor.close()

    between(test, hosts=("here", "there"))


def test_a_socket_of_another_machine_with_the_same_name_falls_back_to_the_network():
    async def test(a, b):
        address = b.address()
        gone = PeerAddress(
            worker=B,
            host_id=address.host_id,
            hosts=address.hosts,
            port=address.port,
            fingerprint=address.fingerprint,
            unix_path="/no/such/socket",
        )
        await a.peers.dial(gone, A)
        assert a.peers.carriers == {B: "tls"}

    between(test)


def test_a_link_that_opens_and_then_carries_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(peers_module, "PROBE_LIMIT_S", 0.2)

    async def test(a, _b):
        async def black_hole(link, _peer):
            link.accept()
            while True:
                await link.receive()

        hole = FrameServer(black_hole)
        await hole.start("127.0.0.1")
        address = PeerAddress(
            worker=B, host_id="there", hosts=("127.0.0.1",), port=hole.port, fingerprint=hole.fingerprint
        )
        with pytest.raises(NetworkError, match="did not get through"):
            await a.peers.dial(address, A)
        assert not a.peers.links
        await hole.close()

    between(test)


def test_an_address_at_which_nobody_answers_is_an_error_and_no_link():
    async def test(a, b):
        with pytest.raises(NetworkError, match=r"127\.0\.0\.9"):
            await a.peers.dial(b.address(hosts=("127.0.0.9",), unix=False), A)
        assert not a.peers.links

    between(test, hosts=("here", "there"))


def test_a_worker_that_opens_no_port_is_not_dialled():
    async def test(a, _b):
        closed = PeerAddress(worker=B, host_id="here", hosts=("127.0.0.1",), port=0, fingerprint="0" * 64)
        with pytest.raises(NetworkError, match="opens no port"):
            await a.peers.dial(closed, A)

    between(test)


@pytest.mark.parametrize(
    "first_frame",
    [
        control(PeerHello(run=RUN, source=A, token="a-guess")),
        control(PeerHello(run=RunId("another"), source=A, token=TOKEN)),
        Frame(FrameHeader(kind="hidden")),
    ],
    ids=["wrong token", "other run", "no hello"],
)
def test_strangers_are_not_let_in(first_frame):
    async def test(a, b):
        join = JoinLink(hosts=("127.0.0.1",), port=b.server.port, fingerprint=b.server.fingerprint, token=TOKEN)
        link = await connect(join)
        await link.send(first_frame)
        with pytest.raises(NetworkError):
            await link.receive()
        await link.close()
        assert not b.peers.links
        await a.peers.dial(b.address(), A)

    between(test)


def test_nobody_is_let_in_before_the_coordinator_has_given_out_a_token():
    async def test(a, b):
        b.peers.expect(RUN, "")
        a.peers.expect(RUN, "")
        with pytest.raises(NetworkError):
            await a.peers.dial(b.address(), A)
        assert not b.peers.links

    between(test)


def test_both_ends_notice_that_a_link_ended():
    async def test(a, b):
        await a.peers.dial(b.address(), A)
        await until(lambda: b.peers.links)
        a.peers.links[B].abort()
        await until(lambda: a.lost and b.lost)
        assert (a.lost, b.lost) == ([B], [A])
        assert not a.peers.links
        assert not b.peers.links

    between(test)
