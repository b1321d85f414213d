"""A frame: a small msgpack header and the raw bytes of its tensors."""

from collections.abc import Sequence

import msgspec

from coterie.ids import RunId, WorkerId

Buffer = bytes | bytearray | memoryview


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one tensor's bytes mean: `dtype` and `shape` after decoding, `codec` and `nbytes` on the wire."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    codec: str = "raw"


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who says what to whom, about which run, plan, step and micro-batch.

    A receiver drops frames of another run or an older plan; data of different micro-batches can thus never be paired.
    `body` holds a msgpack-encoded message where `kind` is `control`; the transport does not look into it.
    """

    kind: str
    source: WorkerId = WorkerId("")
    target: WorkerId = WorkerId("")
    run: RunId = RunId("")
    plan_version: int = 0
    step: int = 0
    micro_batch: int = 0
    body: bytes = b""
    tensors: tuple[TensorSpec, ...] = ()


class Frame:
    """A header and one buffer per tensor, in the order of `header.tensors`."""

    __slots__ = ("buffers", "header")

    def __init__(self, header: FrameHeader, buffers: Sequence[Buffer] = ()) -> None:
        self.header = header
        self.buffers = tuple(buffers)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors on the wire."""
        return sum(spec.nbytes for spec in self.header.tensors)
