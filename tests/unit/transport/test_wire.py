import pickle
import tracemalloc
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ProtocolError, VersionMismatchError
from coterie.ids import RunId, WorkerId
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.limits import Limits, check_header
from coterie.transport.wire import MAGIC, PREAMBLE, WIRE_VERSION, FrameReader, flat_view, frame_head, placed_head

SMALL = Limits(max_header_bytes=4096, max_tensors=4, max_tensor_bytes=1 << 16, max_frame_bytes=1 << 17)


def wire(frame: Frame) -> bytes:
    return frame_head(frame, Limits()) + b"".join(bytes(buffer) for buffer in frame.buffers)


def example(*shapes: tuple[int, ...], body: bytes = b"") -> Frame:
    arrays = [np.arange(int(np.prod(shape)), dtype=np.float32) for shape in shapes]
    specs = tuple(
        TensorSpec(name=f"t{i}", dtype="float32", shape=shape, nbytes=array.nbytes)
        for i, (shape, array) in enumerate(zip(shapes, arrays, strict=True))
    )
    header = FrameHeader(
        kind="hidden",
        source=WorkerId("a"),
        target=WorkerId("b"),
        run=RunId("r"),
        plan_version=3,
        step=7,
        micro_batch=2,
        body=body,
        tensors=specs,
    )
    return Frame(header, [array.data for array in arrays])


def feed(reader: FrameReader, data: bytes, sizes: list[int] | None = None) -> list[Frame]:
    """Give `data` to a reader, in pieces of `sizes` bytes, then of whatever it asks for."""
    frames, at, cuts = [], 0, list(sizes or [])
    while at < len(data):
        target = reader.target()
        assert 0 < len(target) <= max(reader.limits.max_header_bytes, reader.limits.max_tensor_bytes)
        count = min(len(target), len(data) - at, max(1, cuts.pop(0)) if cuts else len(target))
        target[:count] = data[at : at + count]
        at += count
        frame = reader.advance(count)
        if frame is not None:
            frames.append(frame)
    return frames


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=4),
    body=st.binary(max_size=300),
    sizes=st.lists(st.integers(1, 200), max_size=60),
)
def test_frames_survive_any_chunking(shapes: list[tuple[int, ...]], body: bytes, sizes: list[int]) -> None:
    sent = example(*shapes, body=body)
    received = feed(FrameReader(Limits()), wire(sent) * 2, sizes)
    assert [frame.header for frame in received] == [sent.header] * 2
    for frame in received:
        assert [bytes(buffer) for buffer in frame.buffers] == [bytes(flat_view(buffer)) for buffer in sent.buffers]


@given(data=st.binary(max_size=400), sizes=st.lists(st.integers(1, 50), max_size=30), valid_start=st.booleans())
def test_arbitrary_bytes_are_refused_and_never_crash(data: bytes, sizes: list[int], *, valid_start: bool) -> None:
    if valid_start:
        data = PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, max(1, len(data)), 0) + data
    reader = FrameReader(SMALL)
    try:
        frames = feed(reader, data, sizes)
    except (ProtocolError, VersionMismatchError):
        return
    for frame in frames:
        check_header(frame.header, frame.payload_bytes, SMALL)


@given(
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 90), max_size=30),
)
def test_damaged_frames_are_refused_or_still_within_the_limits(flips: list[tuple[int, int]], sizes: list[int]) -> None:
    data = bytearray(wire(example((2, 3), (4,))))
    for position, value in flips:
        data[position % len(data)] = value
    try:
        frames = feed(FrameReader(SMALL), bytes(data), sizes)
    except (ProtocolError, VersionMismatchError):
        return
    for frame in frames:
        check_header(frame.header, frame.payload_bytes, SMALL)


def test_a_pickle_is_no_frame() -> None:
    with pytest.raises(ProtocolError, match="no frame"):
        feed(FrameReader(Limits()), pickle.dumps({"a": list(range(100))}))


def test_a_pickle_in_the_place_of_the_header_is_no_header() -> None:
    data = pickle.dumps({"kind": "x"})
    with pytest.raises(ProtocolError, match="cannot be understood"):
        feed(FrameReader(Limits()), PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, len(data), 0) + data)


def test_another_wire_version_is_named_beside_ours() -> None:
    data = PREAMBLE.pack(MAGIC, 9, 0, 10, 0)
    with pytest.raises(VersionMismatchError, match=f"speaks wire format 9, this side speaks {WIRE_VERSION}"):
        feed(FrameReader(Limits()), data)


def test_a_set_reserved_field_is_refused() -> None:
    with pytest.raises(ProtocolError, match="reserved"):
        feed(FrameReader(Limits()), PREAMBLE.pack(MAGIC, WIRE_VERSION, 1, 10, 0))


@given(sizes=st.lists(st.integers(1, 9), max_size=40), offset=st.integers(0, 2**64 - 1))
def test_tensors_that_lie_in_shared_memory_are_taken_from_where_the_frame_says(sizes: list[int], offset: int) -> None:
    asked = []

    def take(at: int, buffers: Sequence[memoryview]) -> None:
        asked.append(at)
        for buffer in buffers:
            buffer[:] = b"t" * len(buffer)

    reader, sent = FrameReader(Limits()), example((2, 3), (0,), (4,))
    reader.take = take
    head = placed_head(frame_head(sent, Limits()), offset)
    placed, plain = feed(reader, head + wire(sent), sizes)
    assert asked == [offset]
    assert placed.header == plain.header == sent.header
    assert [bytes(buffer) for buffer in placed.buffers] == [b"t" * 24, b"", b"t" * 16]
    assert [bytes(buffer) for buffer in plain.buffers] == [bytes(buffer) for buffer in sent.buffers]
    assert not reader.is_mid_frame


def test_tensors_in_shared_memory_are_held_to_the_same_limits() -> None:
    taken = []
    reader = FrameReader(SMALL)
    reader.take = lambda *call: taken.append(call)
    with pytest.raises(ProtocolError, match="tensors"):
        feed(reader, placed_head(frame_head(example((40_000,)), Limits()), 0))
    assert not taken


@pytest.mark.parametrize(("header_bytes", "payload_bytes"), [(2**32 - 1, 0), (100, 2**63), (0, 0)])
def test_huge_and_empty_lengths_are_refused_before_anything_is_allocated(header_bytes: int, payload_bytes: int) -> None:
    reader = FrameReader(Limits())
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            feed(reader, PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, header_bytes, payload_bytes))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_tensor_announced_with_the_wrong_size_is_refused_before_anything_is_allocated() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(2,), nbytes=1 << 32)
    header = msgspec.msgpack.encode(FrameHeader(kind="x", tensors=(spec,)))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="takes 8"):
            feed(FrameReader(Limits()), PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, len(header), 1 << 32) + header)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


@pytest.mark.parametrize(
    "header",
    [
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"kind": 3}),
        msgspec.msgpack.encode({"kind": "x", "step": "7"}),
        msgspec.msgpack.encode({"kind": "x", "step": 1.0}),
        msgspec.msgpack.encode(
            {"kind": "x", "tensors": [{"name": "a", "dtype": "float32", "shape": [1.5], "nbytes": 4}]}
        ),
        msgspec.msgpack.encode({"kind": "x", "tensors": [{"name": "a"}]}),
        msgspec.msgpack.encode(FrameHeader(kind="x")) + b"\x00",
        b"\x81\xa4kind\xa2\xff\xfe",
        b"\x81\xa1z" + b"\x91" * 3000 + b"\x01",
    ],
)
def test_headers_of_the_wrong_types_are_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be understood"):
        feed(FrameReader(Limits()), PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, len(header), 0) + header)


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    header = msgspec.msgpack.encode({"kind": "x", "colour": "blue"})
    (frame,) = feed(FrameReader(Limits()), PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, len(header), 0) + header)
    assert frame.header == FrameHeader(kind="x")


def test_received_tensors_lie_in_writable_memory_aligned_for_any_dtype() -> None:
    (frame,) = feed(FrameReader(Limits()), wire(example((3,), (1,), (5, 5))))
    for buffer in frame.buffers:
        array = np.frombuffer(buffer, np.uint8)
        assert array.flags.writeable
        assert array.ctypes.data % 8 == 0


def test_missing_bytes_count_down_to_the_end_of_the_tensors() -> None:
    reader = FrameReader(Limits())
    head = frame_head(example((4,), (2,)), Limits())
    feed(reader, head)
    assert reader.missing_bytes == 24
    feed(reader, bytes(16))
    assert reader.missing_bytes == 8
    assert reader.is_mid_frame
    assert len(feed(reader, bytes(8))) == 1
    assert reader.missing_bytes == 0
    assert not reader.is_mid_frame


def test_a_frame_that_contradicts_its_own_buffers_cannot_be_sent() -> None:
    frame = example((4,))
    with pytest.raises(ProtocolError, match=r"buffers hold \(12,\) bytes, its header says \(16,\)"):
        frame_head(Frame(frame.header, [bytes(12)]), Limits())
    with pytest.raises(ProtocolError):
        frame_head(Frame(frame.header, []), Limits())
    with pytest.raises(ProtocolError):
        frame_head(Frame(FrameHeader(kind="x", body=bytes(5000))), SMALL)
