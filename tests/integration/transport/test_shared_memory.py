"""Peers that share memory over real sockets: what crosses, hostile ones, and ones that die."""

import asyncio
import mmap
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.errors import NetworkError, ProtocolError
from coterie.transport.connect import connect, connect_unix
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.limits import Limits
from coterie.transport.server import FrameServer
from coterie.transport.shared_memory import HALF_BYTES, knows_memory_files
from coterie.transport.stream_link import MEMORY_NOTE, NOTE_BYTES
from coterie.transport.wire import PLACE, frame_head, placed_head
from coterie.units import MIB

if sys.platform != "linux" or not knows_memory_files():
    pytest.skip("only Linux has anonymous memory files, and not every Python there", allow_module_level=True)

import fcntl

DYING = """
import asyncio, sys
from pathlib import Path
from coterie.transport.connect import connect_unix
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
async def die():
    link = await connect_unix(Path(sys.argv[1]))
    while not link.shares_memory:
        await asyncio.sleep(0)
    spec = TensorSpec(name="x", dtype="uint8", shape=(1 << 20,), nbytes=1 << 20)
    while True:
        await link.send(Frame(FrameHeader(kind="hidden", tensors=(spec,)), (bytes(1 << 20),)))
        await link.receive()
asyncio.run(die())
"""


def frame_of(data: bytes) -> Frame:
    spec = TensorSpec(name="x", dtype="uint8", shape=(len(data),), nbytes=len(data))
    return Frame(FrameHeader(kind="hidden", tensors=(spec,)), (data,))


class Host:
    """A server that lets everybody in and shares memory with them."""

    def __init__(self):
        self.links = asyncio.Queue()
        self.server = FrameServer(self._on_link)

    async def _on_link(self, link, _):
        link.accept()
        link.share_memory()
        self.links.put_nowait(link)

    async def __aenter__(self):
        await self.server.start("127.0.0.1")
        return self

    async def __aexit__(self, *_):
        await self.server.close()

    def raw_peer(self):
        """A connection of somebody who is free to send anything."""
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(str(self.server.unix_path))
        return peer


async def passed_to(peer):
    """The note and the memory that a peer was given, who from now on waits in the event loop."""
    note, (memory, freed), _, _ = await asyncio.to_thread(socket.recv_fds, peer, len(NOTE_BYTES), 2)
    os.close(freed)
    peer.settimeout(0)
    return note, memory


def test_a_large_frame_lies_in_memory_and_only_its_head_crosses_the_socket(bounded):
    async def test():
        async with Host() as host:
            with host.raw_peer() as peer:
                note, descriptor = await passed_to(peer)
                assert note == NOTE_BYTES
                link = await host.links.get()
                data = random.Random(0).randbytes(MIB)
                await link.send(frame_of(data))
                whole = frame_head(frame_of(data), Limits()) + data
                came = b""
                while len(came) < len(whole):
                    came += await asyncio.get_running_loop().sock_recv(peer, MIB)
                assert came == whole, "the peer has not answered: all of it goes over the socket"

                await asyncio.get_running_loop().sock_sendall(peer, NOTE_BYTES)
                while not link.shares_memory:
                    await asyncio.sleep(0)
                await link.send(frame_of(data))
                expected = placed_head(frame_head(frame_of(data), Limits()), 0)
                assert await asyncio.get_running_loop().sock_recv(peer, MIB) == expected
                with mmap.mmap(descriptor, 2 * HALF_BYTES) as memory:
                    assert memory[:MIB] == data
                assert link.bytes_sent == 2 * len(whole)
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, 0)
                os.close(descriptor)

    bounded(test)


def test_places_outside_the_memory_cost_their_sender_the_link_and_nobody_else(bounded):
    draw = random.Random(1)
    head = frame_head(frame_of(bytes(MIB)), Limits())
    places = [HALF_BYTES - MIB + 1, HALF_BYTES, 2 * HALF_BYTES - MIB, 2**64 - 1, 2**63, 2**64 - MIB]
    places += [draw.randrange(HALF_BYTES - MIB + 1, 2 ** draw.randrange(25, 65)) for _ in range(30)]

    async def test():
        async with Host() as host:
            good = await connect_unix(host.server.unix_path)
            good_end = await host.links.get()
            for place in places:
                with host.raw_peer() as peer:
                    end = await host.links.get()
                    peer.sendall(NOTE_BYTES + placed_head(head, HALF_BYTES - MIB) + placed_head(head, place))
                    assert (await end.receive()).payload_bytes == MIB, "the last place that is right"
                    with pytest.raises(ProtocolError, match="shared memory"):
                        await end.receive()
                    assert end.is_closed
                await good.send(frame_of(bytes(MIB)))
                await good_end.receive()
            await good.close()

    bounded(test)


def test_a_peer_that_never_says_what_it_has_read_is_served_over_the_socket(bounded):
    async def test():
        async with Host() as host:
            with host.raw_peer() as peer:
                _, descriptor = await passed_to(peer)
                os.close(descriptor)
                link = await host.links.get()
                await asyncio.get_running_loop().sock_sendall(peer, NOTE_BYTES)
                while not link.shares_memory:
                    await asyncio.sleep(0)
                frame = frame_of(bytes(MIB))
                in_memory = HALF_BYTES // MIB
                whole = (in_memory + 3) * len(frame_head(frame, Limits())) + in_memory * PLACE.size + 3 * MIB

                async def take(count):
                    while count:
                        count -= len(await asyncio.get_running_loop().sock_recv(peer, min(count, MIB)))

                taking = asyncio.create_task(take(whole))
                for _ in range(in_memory + 3):
                    await link.send(frame)
                await taking

    bounded(test)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_memory_that_its_owner_could_shrink_is_never_mapped_and_frames_go_on_over_the_socket(bounded, tmp_path, seals):
    async def test():
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "link"))
            listener.listen()
            link = await connect_unix(tmp_path / "link")
            owner, _ = listener.accept()
            descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, 2 * HALF_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            with owner, socket.socket() as other:
                socket.send_fds(owner, [NOTE_BYTES], [descriptor, other.fileno()])
                os.ftruncate(descriptor, 0)
                os.close(descriptor)
                data = frame_head(frame_of(b"123"), Limits()) + b"123"
                owner.sendall(data)
                assert bytes((await link.receive()).buffers[0]) == b"123"
                assert not link.shares_memory
                assert "memfd:hostile" not in Path("/proc/self/maps").read_text()
                owner.sendall(placed_head(frame_head(frame_of(b"123"), Limits()), 0))
                with pytest.raises(ProtocolError, match="reserved"):
                    await link.receive()

    bounded(test)


def test_talk_of_shared_memory_over_a_network_or_twice_is_refused(bounded, join_of):
    async def test():
        async with Host() as host:
            dialled = await connect(join_of(host.server))
            end = await host.links.get()
            await dialled.send(Frame(MEMORY_NOTE))
            with pytest.raises(ProtocolError, match="shared memory"):
                await end.receive()
            with host.raw_peer() as peer:
                end = await host.links.get()
                peer.sendall(2 * NOTE_BYTES)
                with pytest.raises(ProtocolError, match="shared memory"):
                    await end.receive()
            with pytest.raises(NetworkError):
                await dialled.receive()

    bounded(test)


def test_nothing_is_passed_to_a_peer_that_was_not_let_in(bounded):
    refused = []

    async def share(link, _):
        with pytest.raises(AssertionError, match="let in"):
            link.share_memory()
        refused.append(link)
        link.abort()

    async def test():
        server = FrameServer(share)
        await server.start("127.0.0.1")
        link = await connect_unix(server.unix_path)
        with pytest.raises(NetworkError):
            await link.receive()
        assert refused
        await server.close()

    bounded(test)


def test_of_a_process_that_is_killed_its_frames_are_whole_and_no_memory_is_left(bounded):
    async def exchange(link, process):
        count = 0
        while True:
            frame = await link.receive()
            assert bytes(frame.buffers[0]) == bytes(MIB)
            count += 1
            if count == 15:
                process.kill()
            await link.send(Frame(FrameHeader(kind="done")))

    async def test():
        async with Host() as host:
            with subprocess.Popen([sys.executable, "-c", DYING, str(host.server.unix_path)]) as process:
                link = await host.links.get()
                with pytest.raises(NetworkError):
                    await exchange(link, process)
            assert "memfd:coterie" not in Path("/proc/self/maps").read_text()

    bounded(test)
