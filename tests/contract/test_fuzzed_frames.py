"""Frames and messages spoilt in every way that a program thinks of: an error of ours, within the limits, or a frame."""

import asyncio
import random
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.cluster.messages import CONTROL, pack, unpack
from coterie.errors import CoterieError
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.limits import BEFORE_ACCEPT, Limits
from coterie.transport.stream_link import StreamLink
from coterie.transport.wire import FrameReader
from testbed import fuzzing

SMALL = Limits(max_header_bytes=16 * 1024, max_tensors=4, max_tensor_bytes=1 << 14, max_frame_bytes=1 << 15)
KEPT_BYTES = 8
"""A header's bytes, decoded, may take this many times their room: a small number is an object in Python."""
LONG_SEARCH, SLICE = 100_000, 5_000

draws = st.integers(0, 2**40).map(random.Random)
Listening = Callable[..., AbstractAsyncContextManager[Any]]  # the fixture's own class lives in conftest.py


def read(data: bytes, limits: Limits, draw: random.Random) -> tuple[list[Frame], int]:
    """What a receiver makes of a stream, all the way to tensors; the most memory that it set aside at once."""
    reader, frames, at, most_bytes = FrameReader(limits), [], 0, 0
    while at < len(data):
        target = reader.target()
        most_bytes = max(most_bytes, len(target), reader.missing_bytes)
        count = min(len(target), len(data) - at, draw.choice((1, 7, 1000)))
        target[:count] = data[at : at + count]
        at += count
        frame = reader.advance(count)
        if frame is not None:
            frames.append(frame)
    return frames, most_bytes


def understand(frame: Frame, limits: Limits) -> None:
    """Decode a frame that came through; it must be within the limits."""
    assert sum(memoryview(buffer).nbytes for buffer in frame.buffers) <= limits.max_frame_bytes
    for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True):
        tensor = decode(spec, buffer)
        assert tuple(tensor.shape) == spec.shape
        assert tensor.nbytes <= limits.max_tensor_bytes
    if frame.header.kind == CONTROL:
        unpack(frame.header.body)


def survive(draw: random.Random, limits: Limits = SMALL) -> None:
    """One spoilt stream and one spoilt message."""
    data, body = fuzzing.stream(draw), fuzzing.spoilt_message(draw)
    tracemalloc.start()  # not before: making them up takes eight times as long while memory is traced
    try:
        decode_both(data, body, limits, draw)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= KEPT_BYTES * (limits.max_frame_bytes + limits.max_header_bytes + len(data) + len(body))


def decode_both(data: bytes, body: bytes, limits: Limits, draw: random.Random) -> None:
    """Whatever is not understood is refused by an error of ours."""
    try:
        frames, most_bytes = read(data, limits, draw)
        assert most_bytes <= max(limits.max_header_bytes, limits.max_frame_bytes)
        for frame in frames:
            understand(frame, limits)
    except CoterieError:
        pass
    with suppress(CoterieError):
        assert unpack(pack(unpack(body))) is not None


@given(draw=draws)
def test_every_message_survives_its_own_packing(draw):
    tree = fuzzing.message_tree(draw)
    packed = msgspec.msgpack.encode(tree)
    assert pack(unpack(packed)) == pack(unpack(pack(unpack(packed))))


@given(draw=draws)
def test_spoilt_streams_and_messages_are_refused_or_understood_within_the_limits(draw):
    survive(draw)


@given(draw=draws)
def test_a_peer_without_a_token_cannot_make_us_set_memory_aside(draw):
    try:
        _, most_bytes = read(fuzzing.stream(draw), BEFORE_ACCEPT, draw)
    except CoterieError:
        return
    assert most_bytes <= BEFORE_ACCEPT.max_header_bytes


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, LONG_SEARCH, SLICE))
def test_a_hundred_thousand_spoilt_inputs(first):
    for seed in range(first, first + SLICE):
        try:
            survive(random.Random(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def understand_all(link: StreamLink) -> None:
    while True:
        understand(await link.receive(), SMALL)


@pytest.mark.parametrize("carrier", ["tls", "plain"])
def test_a_served_link_survives_a_sample_of_spoilt_streams(carrier, listening: Listening):
    """Over a real socket: each stream costs its own link, and the server goes on with the others."""

    async def all_of_them() -> None:
        async with asyncio.timeout(120), listening(carrier, SMALL) as place:
            good = await place.dial()
            good_end = await place.arrived.get()
            for seed in range(60):
                _, writer = await place.dial_raw()
                end = await place.arrived.get()
                writer.write(fuzzing.stream(random.Random(seed)))
                writer.close()
                with pytest.raises(CoterieError):
                    await understand_all(end)
                await end.close()
                await good.send(Frame(FrameHeader(kind="data", step=seed)))
                assert (await good_end.receive()).header.step == seed
            await good.close()

    asyncio.run(all_of_them())
