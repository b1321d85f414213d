"""What a received frame may claim, checked before a single byte is allocated for it."""

import math

import msgspec

from coterie.errors import ProtocolError
from coterie.transport.frame import FrameHeader, TensorSpec
from coterie.units import GIB, MIB, format_bytes

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element of every dtype that may cross a link."""

LOSSY_DTYPES = frozenset({"float32", "float16", "bfloat16"})
"""The dtypes that the codecs `fp16`, `int8` and `int4` accept."""

SCALE_BYTES = 4
"""`fp16` sends one float32 scale per tensor, `int8` one per row, `int4` one per group, before the elements."""

GROUP_ELEMENTS = 64
"""`int4` gives this many neighbours in a row one scale; the last group of a row may be shorter."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest frame that a link takes or sends.

    Attributes:
        max_header_bytes: The msgpack header, control messages included.
        max_tensors: Tensors in one frame.
        max_tensor_bytes: One tensor, on the wire and in the memory that decoding it takes.
        max_frame_bytes: All tensors of a frame on the wire.
        max_rank: Dimensions of a tensor.
        dtypes: The dtypes taken.
    """

    max_header_bytes: int = 4 * MIB
    max_tensors: int = 4096
    max_tensor_bytes: int = 4 * GIB
    max_frame_bytes: int = 8 * GIB
    max_rank: int = 8
    dtypes: frozenset[str] = frozenset(ITEM_BYTES)


BEFORE_ACCEPT = Limits(max_header_bytes=64 * 1024, max_tensors=0, max_tensor_bytes=0, max_frame_bytes=0)
"""For a peer that has not shown its token yet: room for a hello, none for tensors."""


def wire_bytes(dtype: str, shape: tuple[int, ...], codec: str) -> int:
    """Bytes that a tensor takes on the wire.

    Raises:
        ProtocolError: An unknown dtype or codec, or a codec that does not take this dtype.
    """
    if dtype not in ITEM_BYTES:
        raise ProtocolError(f"dtype {dtype!r} may not cross a link; known are {', '.join(ITEM_BYTES)}")
    elements = math.prod(shape)
    if codec == "raw":
        return elements * ITEM_BYTES[dtype]
    if codec not in {"fp16", "int8", "int4"}:
        raise ProtocolError(f"codec {codec!r} is not known; known are raw, fp16, int8, int4")
    if dtype not in LOSSY_DTYPES:
        raise ProtocolError(
            f"codec {codec} takes {', '.join(sorted(LOSSY_DTYPES))}, not {dtype}", hint="send this tensor raw"
        )
    if codec == "fp16":
        return SCALE_BYTES + 2 * elements
    if codec == "int8":
        return SCALE_BYTES * row_count(shape) + elements
    width = row_width(shape)
    return row_count(shape) * (SCALE_BYTES * group_count(width) + packed_bytes(width))


def decoded_bytes(dtype: str, shape: tuple[int, ...], codec: str) -> int:
    """Most memory that decoding a tensor takes, where a size of 0 counts as 1.

    Every codec but `raw` makes float32 of it first, `int4` with whole groups: a row of one element takes the room
    of a group. An empty tensor takes nothing, but its other sizes must still be numbers that tensors can have.
    """
    sizes = tuple(max(size, 1) for size in shape)
    if codec == "raw":
        return math.prod(sizes) * ITEM_BYTES[dtype]
    if codec == "int4":
        return row_count(sizes) * group_count(row_width(sizes)) * GROUP_ELEMENTS * ITEM_BYTES["float32"]
    return math.prod(sizes) * ITEM_BYTES["float32"]


def row_count(shape: tuple[int, ...]) -> int:
    """Rows of a tensor [..., D]: the vectors along its last dimension; a scalar is one row."""
    return math.prod(shape[:-1]) if math.prod(shape) else 0


def row_width(shape: tuple[int, ...]) -> int:
    """Elements of one row of a tensor [..., D]; a scalar is a row of one."""
    return shape[-1] if shape else 1


def group_count(width: int) -> int:
    """Groups of a row of `width` elements under `int4`."""
    return -(-width // GROUP_ELEMENTS)


def packed_bytes(width: int) -> int:
    """Bytes of a row of `width` elements of four bits; an odd last one has a byte to itself."""
    return -(-width // 2)


def check_preamble(header_bytes: int, payload_bytes: int, limits: Limits) -> None:
    """Check the two lengths that open a frame.

    Raises:
        ProtocolError: One is over its limit, or the header is empty.
    """
    if not 0 < header_bytes <= limits.max_header_bytes:
        raise ProtocolError(
            f"a frame header of {format_bytes(header_bytes)}; between 1 B and "
            f"{format_bytes(limits.max_header_bytes)} are allowed here"
        )
    if payload_bytes > limits.max_frame_bytes:
        raise ProtocolError(
            f"a frame with {format_bytes(payload_bytes)} of tensors; "
            f"{format_bytes(limits.max_frame_bytes)} are allowed here"
        )


def check_header(header: FrameHeader, payload_bytes: int, limits: Limits) -> None:
    """Check every tensor that a header announces, and that together they are `payload_bytes`.

    Raises:
        ProtocolError: The header breaks a limit or contradicts itself.
    """
    if len(header.tensors) > limits.max_tensors:
        raise ProtocolError(f"a frame with {len(header.tensors)} tensors; {limits.max_tensors} are allowed here")
    for spec in header.tensors:
        check_tensor(spec, limits)
    total = sum(spec.nbytes for spec in header.tensors)
    if total != payload_bytes:
        raise ProtocolError(f"a frame of {payload_bytes} payload bytes whose tensors add up to {total}")
    if total > limits.max_frame_bytes:
        raise ProtocolError(
            f"a frame with {format_bytes(total)} of tensors; {format_bytes(limits.max_frame_bytes)} are allowed here"
        )


def check_tensor(spec: TensorSpec, limits: Limits) -> None:
    """Check one announced tensor.

    Raises:
        ProtocolError: Its dtype, rank, shape or size breaks a limit, or its size does not follow from its shape.
    """
    if spec.dtype not in limits.dtypes:
        raise ProtocolError(f"tensor {spec.name[:80]!r}: dtype {spec.dtype[:40]!r} is not allowed here")
    if len(spec.shape) > limits.max_rank:
        raise ProtocolError(f"tensor {spec.name[:80]!r}: {len(spec.shape)} dimensions; at most {limits.max_rank}")
    if any(size < 0 for size in spec.shape):
        raise ProtocolError(f"tensor {spec.name[:80]!r}: negative size in shape {spec.shape}")
    expected = wire_bytes(spec.dtype, spec.shape, spec.codec)
    if spec.nbytes != expected:
        raise ProtocolError(
            f"tensor {spec.name[:80]!r}: {spec.nbytes} bytes announced, but {spec.dtype} {spec.shape} as {spec.codec} "
            f"takes {expected}"
        )
    needed_bytes = max(spec.nbytes, decoded_bytes(spec.dtype, spec.shape, spec.codec))
    if needed_bytes > limits.max_tensor_bytes:
        raise ProtocolError(
            f"tensor {spec.name[:80]!r}: {format_bytes(needed_bytes)} for {spec.dtype} {spec.shape} as {spec.codec}; "
            f"at most {format_bytes(limits.max_tensor_bytes)}"
        )
