"""One suite for every carrier of frames: in memory, TCP with TLS, plain TCP, Unix socket, shared memory."""

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from coterie.errors import NetworkError, OutOfMemoryError, ProtocolError
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.limits import Limits
from coterie.transport.link import Link
from coterie.transport.memory_link import MemoryLink
from coterie.transport.probe import answer_probe, probe
from coterie.transport.shared_memory import knows_memory_files
from coterie.transport.socket_options import LOW_WATER_BYTES, TLS_LOW_WATER_BYTES, TLS_RECORD_BYTES
from coterie.transport.stream_link import StreamLink
from coterie.transport.wire import frame_head
from coterie.units import MIB

STREAMS = ["tls", "plain"] + ([] if sys.platform == "win32" else ["unix"])
CARRIERS = ["memory", *STREAMS] + (["shared"] if knows_memory_files() else [])
AnyLink = MemoryLink | StreamLink
Pair = Callable[..., AbstractAsyncContextManager[tuple[AnyLink, AnyLink]]]
KERNEL_BYTES = 24 * MIB  # what both ends' socket buffers may hold at most
QUIET_S = 0.3


def frame_of(size: int, *, step: int = 0) -> Frame:
    values = np.full(size, step % 251, np.uint8)
    specs = (TensorSpec(name="x", dtype="uint8", shape=(size,), nbytes=size),)
    return Frame(FrameHeader(kind="data", step=step, tensors=specs), [values.data])


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_frames_arrive_whole_and_in_order_both_ways(carrier: str, pair: Pair) -> None:
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


class Scarce:
    """numpy, whose memory lacks for so many arrays."""

    def __init__(self, failures: float) -> None:
        self.failures = failures

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)

    def empty(self, *sizes: object) -> object:
        if self.failures > 0:
            self.failures -= 1
            raise MemoryError
        return np.empty(*sizes)  # type: ignore[call-overload] # as it was called


@pytest.mark.parametrize("carrier", STREAMS)
def test_a_frame_waits_until_there_is_memory_for_it(carrier: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            await one.send(frame_of(7, step=1))
            await other.receive()
            monkeypatch.setattr("coterie.transport.wire.np", Scarce(3))
            for step in range(3):
                await one.send(frame_of(2 * MIB, step=step))
            for step in range(3):
                assert bytes((await other.receive()).buffers[0]) == bytes([step]) * 2 * MIB

    run(test)


@pytest.mark.parametrize("carrier", STREAMS)
def test_a_frame_for_which_there_never_is_memory_closes_the_link(
    carrier: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            monkeypatch.setattr("coterie.transport.stream_link.MEMORY_PATIENCE_S", 0.3)
            monkeypatch.setattr("coterie.transport.wire.np", Scarce(float("inf")))
            await one.send(frame_of(7, step=1))
            with pytest.raises(OutOfMemoryError, match="no memory for a received frame with 7 B of tensors"):
                await other.receive()

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_frame_with_several_tensors_of_changing_shapes_and_dtypes(carrier: str, pair: Pair) -> None:
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
def test_no_frame_waits_for_the_next_one_whatever_its_size(carrier: str, pair: Pair) -> None:
    marks = (TLS_LOW_WATER_BYTES, TLS_LOW_WATER_BYTES + TLS_RECORD_BYTES, 2 * TLS_LOW_WATER_BYTES, LOW_WATER_BYTES)
    sizes = [near + off for near in (1, 16 * 1024, TLS_RECORD_BYTES, 64 * 1024, *marks) for off in (-1, 0, 1, 777)]

    async def test() -> None:
        async with pair(carrier) as (one, other):
            for step, size in enumerate(sizes):
                await one.send(frame_of(size, step=step))
                async with asyncio.timeout(30):
                    frame = await other.receive()
                assert frame.header.step == step
                assert bytes(frame.buffers[0]) == bytes([step]) * size

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_both_ends_may_send_at_once_without_a_deadlock(carrier: str, pair: Pair) -> None:
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
def test_tasks_that_send_at_once_do_not_mix_their_frames(carrier: str, pair: Pair) -> None:
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
def test_a_sender_waits_for_a_receiver_that_does_not_receive(carrier: str, pair: Pair) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            sent = await _send_until_it_waits(one)
            steps = [(await other.receive()).header.step for _ in range(sent + 1)]
            assert steps == list(range(sent + 1)), "the frame whose sender gave up waiting was queued all the same"
            await one.send(frame_of(1, step=99))
            assert (await other.receive()).header.step == 99

    run(test)


def _transfer_peak_bytes(pair: Pair, carrier: str, size: int) -> tuple[int, bool]:
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
def test_32_mib_are_held_once_by_the_receiver_and_not_copied_by_the_sender(carrier: str, pair: Pair) -> None:
    peak_bytes, equal = _transfer_peak_bytes(pair, carrier, 32 * MIB)
    assert equal
    assert peak_bytes < 40 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("carrier", STREAMS)
def test_500_mb_are_held_once_by_the_receiver_and_not_copied_by_the_sender(carrier: str, pair: Pair) -> None:
    peak_bytes, equal = _transfer_peak_bytes(pair, carrier, 500_000_000)
    assert equal
    assert peak_bytes < 520_000_000


@pytest.mark.parametrize("carrier", CARRIERS)
def test_bytes_are_counted_with_their_headers_at_both_ends(carrier: str, pair: Pair) -> None:
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
def test_what_was_sent_before_a_close_still_arrives_and_closing_again_changes_nothing(carrier: str, pair: Pair) -> None:
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
def test_a_close_wakes_those_who_wait_at_both_ends(carrier: str, pair: Pair) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            here, there = asyncio.create_task(one.receive()), asyncio.create_task(other.receive())
            await asyncio.sleep(0)
            await one.close()
            for waiting in (here, there):
                with pytest.raises(NetworkError):
                    await waiting

    run(test)


async def _send_for_ever(link: Link) -> None:
    """A peer takes one frame whole, however large: only further ones make a sender wait."""
    while True:
        await link.send(frame_of(8 * MIB))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_peer_that_closes_wakes_a_sender_that_waits_for_room(carrier: str, pair: Pair) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            sending = asyncio.create_task(_send_for_ever(one))
            await asyncio.sleep(0.05)
            await other.close()
            with pytest.raises(NetworkError):
                await sending

    run(test)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_frame_over_the_senders_own_limits_is_refused_and_the_link_stays_usable(carrier: str, pair: Pair) -> None:
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
def test_a_frame_over_the_receivers_limits_closes_the_link_at_both_ends(carrier: str, pair: Pair) -> None:
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
def test_a_probe_measures_latency_and_both_directions(carrier: str, pair: Pair) -> None:
    async def test() -> None:
        async with pair(carrier) as (one, other):
            result, _ = await asyncio.gather(probe(one, max_bulk_bytes=2 * MIB), answer_probe(other))
            assert result.latency_s > 0
            assert result.send_bytes_per_s > 0
            assert result.receive_bytes_per_s > 0
            await one.send(frame_of(1, step=5))
            assert (await other.receive()).header.step == 5

    run(test)
