"""What a parent and the process that hosts its backend say to each other: msgpack behind a length, arrays beside it."""

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.backends.backend import BackendInfo
from coterie.backends.shares import (
    Array,
    AttentionInputs,
    AttentionShape,
    Gradients,
    Inputs,
    Need,
    NeuronInputs,
    NeuronShape,
    Outputs,
    Shape,
)

ALIGNED_BYTES = 64
MOST_BYTES = 1 << 24
"""Of one message; arrays are not in it. More means that the stream is not ours."""

LENGTH = struct.Struct("<I")

Arrays = dict[str, npt.NDArray[Any]]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where in a block of shared memory an array lies."""

    offset: int
    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of the protocol.

    Attributes:
        call: Which one.
        number: What the result is called, or what is meant.
        loaded: Of a forward: its weights.
        attach: Names of blocks that the child must open first.
        drop: Numbers of weights and forwards that are over.
        block: Where `places` are.
        places: Arrays of the call by name.
        answer: The block that arrays of the reply go into.
        attention: Of a load, if the share is one of heads.
        neurons: Of a load, if it is one of neurons.
        keep_scale: Of a forward.
        inner: Of a forward.
        keep: Of a forward.
        need: Of a backward.
    """

    call: Literal["load", "forward", "backward", "close"]
    number: int = 0
    loaded: int = 0
    attach: tuple[str, ...] = ()
    drop: tuple[int, ...] = ()
    block: str = ""
    places: dict[str, Place] = {}
    answer: str = ""
    attention: AttentionShape | None = None
    neurons: NeuronShape | None = None
    keep_scale: float = 1.0
    inner: bool = False
    keep: bool = True
    need: Need = Need()


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What comes back: an error, or arrays; the first one of a process says where it computes."""

    error: str = ""
    places: dict[str, Place] = {}
    info: BackendInfo | None = None


def write_message(stream: BinaryIO, message: Request | Reply) -> None:
    """Write a message and flush."""
    body = msgspec.msgpack.encode(message)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_bytes(stream: BinaryIO) -> bytes | None:
    """One message's bytes, or None at the stream's end.

    Raises:
        ValueError: The stream is not one of messages.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length:,} bytes")
    body = stream.read(length)
    return body if len(body) == length else None


def room_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What float32 arrays of these shapes take in a block."""
    return sum(_aligned(4 * int(np.prod(shape))) for shape in shapes.values())


def packed_bytes(arrays: Arrays) -> int:
    """What arrays take in a block."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


def pack(arrays: Arrays, memory: memoryview) -> dict[str, Place]:
    """Copy arrays into a block, one after the other."""
    places: dict[str, Place] = {}
    offset = 0
    for name, array in arrays.items():
        place = Place(offset, array.shape, "uint8" if array.dtype == np.uint8 else "float32")
        view(place, memory)[...] = array
        places[name] = place
        offset += _aligned(array.nbytes)
    return places


def view(place: Place, memory: memoryview) -> npt.NDArray[Any]:
    """The array at a place. The block cannot be closed while it lives."""
    return np.ndarray(place.shape, place.dtype, buffer=memory, offset=place.offset)


def inputs_to_arrays(inputs: Inputs) -> Arrays:
    """All arrays of a micro-batch by name; what is added has a dot in front."""
    arrays: Arrays = {"x": inputs.x}
    if isinstance(inputs, AttentionInputs):
        for name, array in (("bias", inputs.bias), ("cos", inputs.cos), ("sin", inputs.sin), ("keep", inputs.keep)):
            if array is not None:
                arrays[name] = array
    return arrays | {f".{name}": array for name, array in inputs.added.items()}


def arrays_to_inputs(shape: Shape, arrays: Arrays, keep_scale: float) -> Inputs:
    """The micro-batch again."""
    added = {name[1:]: array for name, array in arrays.items() if name[0] == "."}
    if isinstance(shape, NeuronShape):
        return NeuronInputs(x=arrays["x"], added=added)
    return AttentionInputs(
        x=arrays["x"],
        bias=arrays.get("bias"),
        cos=arrays.get("cos"),
        sin=arrays.get("sin"),
        keep=arrays.get("keep"),
        keep_scale=keep_scale,
        added=added,
    )


def outputs_to_arrays(outputs: Outputs) -> Arrays:
    """What a forward gave, by name."""
    return {"y": outputs.y} | ({} if outputs.inner is None else {"inner": outputs.inner})


def gradients_to_arrays(gradients: Gradients) -> Arrays:
    """What a backward gave; weights under their names, what was added with a dot in front, x as `x`."""
    arrays: Arrays = {} if gradients.x is None else {"x": gradients.x}
    return arrays | gradients.weights | {f".{name}": array for name, array in gradients.added.items()}


def arrays_to_gradients(arrays: dict[str, Array]) -> Gradients:
    """The gradients again."""
    return Gradients(
        x=arrays.get("x"),
        weights={name: array for name, array in arrays.items() if name != "x" and name[0] != "."},
        added={name[1:]: array for name, array in arrays.items() if name[0] == "."},
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
