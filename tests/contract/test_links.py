"""One suite for every carrier of frames: in memory, TCP with TLS, plain TCP, Unix socket."""

import asyncio
import gc
import pickle
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from coterie.errors import CoterieError, NetworkError, ProtocolError, VersionMismatchError
from coterie.transport.certificates import client_context
from coterie.transport.connect import connect, connect_plain, connect_unix
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.join_link import JoinLink
from coterie.transport.limits import Limits
from coterie.transport.memory_link import MemoryLink, memory_pair
from coterie.transport.probe import answer_probe, probe
from coterie.transport.server import FrameServer, PeerInfo, ServedLink
from coterie.transport.socket_options import LOW_WATER_BYTES, TLS_LOW_WATER_BYTES, TLS_RECORD_BYTES
from coterie.transport.stream_link import StreamLink
from coterie.transport.wire import MAGIC, PREAMBLE, WIRE_VERSION, frame_head
from coterie.units import MIB

STREAMS = ["tls", "plain"] + ([] if sys.platform == "win32" else ["unix"])
CARRIERS = ["memory", *STREAMS]
AnyLink = MemoryLink | StreamLink
KERNEL_BYTES = 24 * MIB  # what both ends' socket buffers may hold at most
QUIET_S = 0.3
NOT_SENT = "a-token-that-no-test-sends"


def frame_of(size: int, *, step: int = 0) -> Frame:
    values = np.full(size, step % 251, np.uint8)
    specs = (TensorSpec(name="x", dtype="uint8", shape=(size,), nbytes=size),)
    return Frame(FrameHeader(kind="data", step=step, tensors=specs), [values.data])


class Listening:
    """A server of one carrier, its accepted links, and how to reach it."""

    def __init__(self, carrier: str, limits: Limits | None = None) -> None:
        self.carrier = carrier
        self.arrived: asyncio.Queue[ServedLink] = asyncio.Queue()
        self._limits = limits
        self.server = FrameServer(self._on_link)

    async def _on_link(self, link: ServedLink, _: PeerInfo) -> None:
        link.accept(self._limits)
        self.arrived.put_nowait(link)

    async def dial(self, limits: Limits | None = None) -> StreamLink:
        if self.carrier == "plain":
            return await connect_plain("127.0.0.1", self.server.plain_port, limits=limits)
        if self.carrier == "unix":
            assert self.server.unix_path is not None
            return await connect_unix(self.server.unix_path, limits=limits)
        join = JoinLink(
            hosts=("127.0.0.1",), port=self.server.port, fingerprint=self.server.fingerprint, token=NOT_SENT
        )
        return await connect(join, limits=limits)

    async def dial_raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is free to send anything."""
        if self.carrier == "plain":
            return await asyncio.open_connection("127.0.0.1", self.server.plain_port)
        if self.carrier == "unix":
            return await asyncio.open_unix_connection(str(self.server.unix_path))
        return await asyncio.open_connection("127.0.0.1", self.server.port, ssl=client_context())


@asynccontextmanager
async def listening(carrier: str, limits: Limits | None = None) -> AsyncIterator[Listening]:
    place = Listening(carrier, limits)
    await place.server.start("127.0.0.1", plain_loopback=carrier == "plain")
    try:
        yield place
    finally:
        await place.server.close()


@asynccontextmanager
async def pair(carrier: str, limits: Limits | None = None) -> AsyncIterator[tuple[AnyLink, AnyLink]]:
    """Two joined links: the end that dialled and the end that was dialled."""
    if carrier == "memory":
        ends = memory_pair(limits)
        yield ends
        for end in ends:
            await end.close()
        return
    async with listening(carrier, limits) as place:
        dialled = await place.dial(limits)
        yield dialled, await place.arrived.get()
        await dialled.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_frames_arrive_whole_and_in_order_both_ways(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            for sender, receiver in ((one, other), (other, one)):
                for step in range(50):
                    await sender.send(frame_of(step * 37, step=step))
                for step in range(50):
                    frame = await receiver.receive()
                    assert frame.header == frame_of(step * 37, step=step).header
                    assert bytes(frame.buffers[0]) == bytes([step]) * (step * 37)

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_frame_with_several_tensors_of_changing_shapes_and_dtypes(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            for tokens in (128, 129, 40, 1, 0):
                arrays = [
                    np.random.default_rng(tokens).standard_normal((2, tokens, 8)).astype(np.float32),
                    np.arange(2 * tokens, dtype=np.int64).reshape(2, tokens),
                    np.ones((2, tokens), np.bool_),
                ]
                specs = tuple(
                    TensorSpec(name=name, dtype=str(array.dtype), shape=array.shape, nbytes=array.nbytes)
                    for name, array in zip("abc", arrays, strict=True)
                )
                await one.send(Frame(FrameHeader(kind="x", tensors=specs), [array.data for array in arrays]))
                frame = await other.receive()
                assert frame.header.tensors == specs
                for array, buffer in zip(arrays, frame.buffers, strict=True):
                    assert bytes(buffer) == array.tobytes()

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_frame_waits_for_the_next_one_whatever_its_size(carrier: str) -> None:
    marks = (TLS_LOW_WATER_BYTES, TLS_LOW_WATER_BYTES + TLS_RECORD_BYTES, 2 * TLS_LOW_WATER_BYTES, LOW_WATER_BYTES)
    sizes = [near + off for near in (1, 16 * 1024, TLS_RECORD_BYTES, 64 * 1024, *marks) for off in (-1, 0, 1, 777)]

    async def test() -> None:
        async with pair(carrier) as (one, other):
            for step, size in enumerate(sizes):
                await one.send(frame_of(size, step=step))
                async with asyncio.timeout(10):
                    frame = await other.receive()
                assert frame.header.step == step
                assert bytes(frame.buffers[0]) == bytes([step]) * size

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_both_ends_may_send_at_once_without_a_deadlock(carrier: str) -> None:
    async def stream(link: AnyLink) -> None:
        for step in range(8):
            await link.send(frame_of(3 * MIB, step=step))

    async def drain(link: AnyLink) -> list[int]:
        return [(await link.receive()).header.step for _ in range(8)]

    async def test() -> None:
        async with pair(carrier) as (one, other):
            _, _, here, there = await asyncio.gather(stream(one), stream(other), drain(one), drain(other))
            assert here == there == list(range(8))

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_tasks_that_send_at_once_do_not_mix_their_frames(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            senders = [asyncio.create_task(one.send(frame_of(MIB + step, step=step))) for step in range(24)]
            for _ in range(24):
                frame = await other.receive()
                step = frame.header.step
                assert bytes(frame.buffers[0]) == bytes([step]) * (MIB + step)
            await asyncio.gather(*senders)

    run(test)


async def _send_until_it_waits(link: AnyLink) -> int:
    """Send 1 MiB at a time to a peer that does not receive; how many frames went before one had to wait."""
    for sent in range((2 * 8 * MIB + KERNEL_BYTES) // MIB):
        try:
            async with asyncio.timeout(QUIET_S):
                await link.send(frame_of(MIB, step=sent))
        except TimeoutError:
            return sent
    raise AssertionError("nothing holds the sender back")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_sender_waits_for_a_receiver_that_does_not_receive(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            sent = await _send_until_it_waits(one)
            steps = [(await other.receive()).header.step for _ in range(sent + 1)]
            assert steps == list(range(sent + 1)), "the frame whose sender gave up waiting was queued all the same"
            await one.send(frame_of(1, step=99))
            assert (await other.receive()).header.step == 99

    run(test)


def _transfer_peak_bytes(carrier: str, size: int) -> tuple[int, bool]:
    """The most memory allocated while one frame of `size` bytes is sent, its source not counted."""
    peak_bytes, equal = 0, False

    async def test() -> None:
        nonlocal peak_bytes, equal
        frame = frame_of(size, step=7)
        async with pair(carrier) as (one, other):
            gc.collect()
            tracemalloc.start()
            try:
                sending = asyncio.create_task(one.send(frame))
                received = await other.receive()
                await sending
                _, peak_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            equal = received.buffers[0] == frame.buffers[0]

    run(test)
    return peak_bytes, equal


@pytest.mark.parametrize("carrier", CARRIERS)
def test_64_mib_in_one_tensor_are_held_once_by_the_receiver_and_not_copied_by_the_sender(carrier: str) -> None:
    peak_bytes, equal = _transfer_peak_bytes(carrier, 64 * MIB)
    assert equal
    assert peak_bytes < 72 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("carrier", STREAMS)
def test_500_mb_in_one_tensor_are_held_once_by_the_receiver_and_not_copied_by_the_sender(carrier: str) -> None:
    peak_bytes, equal = _transfer_peak_bytes(carrier, 500_000_000)
    assert equal
    assert peak_bytes < 520_000_000


@pytest.mark.parametrize("carrier", CARRIERS)
def test_bytes_are_counted_with_their_headers_at_both_ends(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            expected = 0
            for step in range(3):
                frame = frame_of(1000 * step, step=step)
                expected += len(frame_head(frame, Limits())) + 1000 * step
                await one.send(frame)
                await other.receive()
            assert one.bytes_sent == other.bytes_received == expected
            assert one.bytes_received == other.bytes_sent == 0

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_was_sent_before_a_close_still_arrives_and_closing_again_changes_nothing(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            for step in range(5):
                await one.send(frame_of(MIB, step=step))
            received = asyncio.gather(*(other.receive() for _ in range(5)))
            await one.close()
            await one.close()
            assert [frame.header.step for frame in await received] == list(range(5))
            with pytest.raises(NetworkError):
                await other.receive()
            with pytest.raises(NetworkError):
                await one.send(frame_of(1))
            with pytest.raises(NetworkError):
                await one.receive()

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_close_wakes_those_who_wait_at_both_ends(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            here, there = asyncio.create_task(one.receive()), asyncio.create_task(other.receive())
            await asyncio.sleep(0)
            await one.close()
            for waiting in (here, there):
                with pytest.raises(NetworkError):
                    await waiting

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_peer_that_closes_wakes_a_sender_that_waits_for_room(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            sending = asyncio.create_task(one.send(frame_of(64 * MIB)))
            await asyncio.sleep(0.05)
            await other.close()
            with pytest.raises(NetworkError):
                await sending

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_frame_over_the_senders_own_limits_is_refused_and_the_link_stays_usable(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier, Limits(max_tensor_bytes=1000)) as (one, other):
            with pytest.raises(ProtocolError, match="1001 B"):
                await one.send(frame_of(1001))
            broken = frame_of(10)
            with pytest.raises(ProtocolError, match="buffers hold"):
                await one.send(Frame(broken.header, [bytes(9)]))
            await one.send(frame_of(1000, step=3))
            assert (await other.receive()).header.step == 3

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_frame_over_the_receivers_limits_closes_the_link_at_both_ends(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            other.limits = Limits(max_tensor_bytes=1000)
            await one.send(frame_of(1001))
            with pytest.raises(ProtocolError, match="1001 B"):
                await other.receive()
            with pytest.raises(NetworkError):
                await one.receive()

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_probe_measures_latency_and_both_directions(carrier: str) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            result, _ = await asyncio.gather(probe(one, max_bulk_bytes=2 * MIB), answer_probe(other))
            assert 0 < result.latency_s < 1
            assert result.send_bytes_per_s > 1e6
            assert result.receive_bytes_per_s > 1e6
            await one.send(frame_of(1, step=5))
            assert (await other.receive()).header.step == 5

    run(test)


def header_bytes(**fields: object) -> bytes:
    return msgspec.msgpack.encode({"kind": "x", **fields})


def tensor(**fields: object) -> dict[str, object]:
    return {"name": "x", "dtype": "float32", "shape": [2], "nbytes": 8, **fields}


def opened(header: bytes, payload_bytes: int = 0) -> bytes:
    return PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, len(header), payload_bytes) + header


BROKEN = {
    "HTTP instead of a frame": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ProtocolError),
    "a pickle": (pickle.dumps({"weights": [1.0] * 50}), ProtocolError),
    "a pickle as header": (opened(pickle.dumps(["x"])), ProtocolError),
    "another version": (PREAMBLE.pack(MAGIC, WIRE_VERSION + 1, 0, 10, 0), VersionMismatchError),
    "a huge header": (PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, 2**32 - 1, 0), ProtocolError),
    "a huge payload": (PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, 10, 2**64 - 1), ProtocolError),
    "a huge tensor": (opened(header_bytes(tensors=[tensor(shape=[2**40], nbytes=2**42)]), 2**32), ProtocolError),
    "an unknown dtype": (opened(header_bytes(tensors=[tensor(dtype="object")]), 8), ProtocolError),
    "a negative shape": (opened(header_bytes(tensors=[tensor(shape=[-2])]), 8), ProtocolError),
    "a shape of another size": (opened(header_bytes(tensors=[tensor(shape=[3])]), 8), ProtocolError),
    "sizes that do not add up": (opened(header_bytes(tensors=[tensor()]), 12), ProtocolError),
    "a wrong type": (opened(header_bytes(step="1")), ProtocolError),
    "closing in mid-preamble": (MAGIC, NetworkError),
    "closing in mid-header": (opened(header_bytes())[:-1], NetworkError),
    "closing in mid-tensor": (opened(header_bytes(tensors=[tensor()]), 8) + b"1234567", NetworkError),
}


@pytest.mark.parametrize("carrier", STREAMS)
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_or_hostile_peer_loses_its_own_link_and_nobody_else(carrier: str, case: str) -> None:
    data, error = BROKEN[case]

    async def test() -> None:
        async with listening(carrier) as place:
            good = await place.dial()
            good_end = await place.arrived.get()
            _, writer = await place.dial_raw()
            bad_end = await place.arrived.get()
            writer.write(data)
            if error is NetworkError:
                writer.close()
            tracemalloc.start()
            with pytest.raises(error) as caught:
                await bad_end.receive()
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak_bytes < 4 * MIB
            assert isinstance(caught.value, CoterieError)
            if error is NetworkError:
                assert "mid-frame" in str(caught.value)
            with pytest.raises(error):
                await bad_end.receive()
            writer.close()
            await good.send(frame_of(1000, step=1))
            assert (await good_end.receive()).header.step == 1
            await good.close()

    run(test)


@pytest.mark.parametrize("carrier", STREAMS)
def test_a_frame_cut_short_is_noticed_by_what_follows_it(carrier: str) -> None:
    async def test() -> None:
        async with listening(carrier) as place:
            _, writer = await place.dial_raw()
            end = await place.arrived.get()
            whole = opened(header_bytes(tensors=[tensor()]), 8) + bytes(8)
            writer.write(whole + whole[:-3] + whole)
            assert (await end.receive()).payload_bytes == 8
            assert (await end.receive()).payload_bytes == 8
            with pytest.raises(ProtocolError, match="no frame"):
                await end.receive()
            writer.close()

    run(test)
