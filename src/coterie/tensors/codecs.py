"""`encode` and `decode`: a tensor and the bytes that a frame carries.

| codec | bytes | error |
|---|---|---|
| `raw` | as in memory | none |
| `fp16` | a float32 scale, then float16 | 2^-11 of each element, 2^-39 of the largest for the smallest ones |
| `int8` | a float32 scale per row, then int8 | half of 1/127 of each row's largest element |
| `int4` | a float32 scale per group of 64 in a row, then four bits each | half of 1/7 of each group's largest element |

`fp16` first multiplies by a power of two (exact) that brings the largest element just below float16's largest, so
gradients of 1e-9 or 1e9 neither vanish nor overflow. `int4` is for activations that a side network reads, not for links
of a pipeline: the planner does not know it. What is not finite stays visible: `fp16` carries it, in `int8` its row
becomes NaN, in `int4` its group.
"""

import math
from typing import Literal

import numpy as np
import torch

from coterie.errors import ProtocolError
from coterie.transport.frame import Buffer, TensorSpec
from coterie.transport.limits import (
    GROUP_ELEMENTS,
    ITEM_BYTES,
    SCALE_BYTES,
    group_count,
    packed_bytes,
    row_count,
    row_width,
    wire_bytes,
)

Codec = Literal["raw", "fp16", "int8", "int4"]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FP16_EXPONENT = 15
"""The largest element is scaled into [2^14, 2^15); float16 ends at 65504."""
_MAX_SHIFT = 126
"""2^±126 are normal float32 numbers."""
_INT8_MAX = 127
_INT4_MAX = 7
_INT4_ZERO = 8
"""What four bits hold for 0: levels -7..7 become 1..15."""
_TINY = torch.finfo(torch.float32).tiny


def encode(tensor: torch.Tensor, name: str, codec: Codec) -> tuple[TensorSpec, Buffer]:
    """The bytes of a tensor [any shape] and what they mean.

    `raw` copies nothing if the tensor is contiguous and on the CPU: the buffer then is the tensor's memory.

    Raises:
        ProtocolError: A dtype that may not cross a link, or a codec that does not take it.
    """
    dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
    shape = tuple(tensor.shape)
    nbytes = wire_bytes(dtype, shape, codec)
    plain = tensor.detach().cpu().contiguous()
    match codec:
        case "raw":
            buffer = _encode_raw(plain)
        case "fp16":
            buffer = _encode_fp16(plain, nbytes)
        case "int8":
            buffer = _encode_int8(plain, nbytes)
        case "int4":
            buffer = _encode_int4(plain, nbytes)
    assert buffer.nbytes == nbytes
    return TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=nbytes, codec=codec), buffer


def decode(spec: TensorSpec, buffer: Buffer) -> torch.Tensor:
    """The tensor [`spec.shape`] that a buffer holds, on the CPU.

    `raw` copies nothing if the buffer is writable and aligned, as received ones are: the tensor then uses its memory.

    Raises:
        ProtocolError: The spec contradicts itself or the buffer, or a bool is neither 0 nor 1.
    """
    view = memoryview(buffer)
    expected = wire_bytes(spec.dtype, spec.shape, spec.codec)
    if spec.nbytes != expected or view.nbytes != expected:
        raise ProtocolError(
            f"tensor {spec.name[:80]!r}: {spec.dtype} {spec.shape} as {spec.codec} takes {expected} bytes, announced "
            f"{spec.nbytes}, got {view.nbytes}"
        )
    dtype = _DTYPES[spec.dtype]
    if math.prod(spec.shape) == 0:
        return torch.empty(spec.shape, dtype=dtype)
    match spec.codec:
        case "fp16":
            return _decode_fp16(view).to(dtype).reshape(spec.shape)
        case "int8":
            return _decode_int8(view, row_count(spec.shape)).to(dtype).reshape(spec.shape)
        case "int4":
            return _decode_int4(view, spec.shape).to(dtype).reshape(spec.shape)
        case _:
            return _decode_raw(spec, view, dtype)


def _encode_raw(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory as bytes; through uint8, as numpy has no bfloat16."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _decode_raw(spec: TensorSpec, view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    flat = _as_tensor(view, alignment=dtype.itemsize)
    if dtype is torch.bool and bool((flat > 1).any()):
        raise ProtocolError(f"tensor {spec.name[:80]!r}: a bool that is neither 0 nor 1")
    return flat.view(dtype).reshape(spec.shape)


def _encode_fp16(tensor: torch.Tensor, nbytes: int) -> memoryview:
    flat = tensor.reshape(-1).float()
    largest = float(torch.maximum(flat.max(), -flat.min())) if flat.numel() else 0.0
    shift = 0
    if math.isfinite(largest) and largest > 0:
        shift = max(-_MAX_SHIFT, min(_MAX_SHIFT, _FP16_EXPONENT - math.frexp(largest)[1]))
    out = torch.empty(nbytes, dtype=torch.uint8)
    out[:SCALE_BYTES].view(torch.float32).fill_(2.0**-shift)
    out[SCALE_BYTES:].view(torch.float16).copy_(flat.mul(2.0**shift))
    return out.numpy().data


def _decode_fp16(view: memoryview) -> torch.Tensor:
    flat = _as_tensor(view, alignment=SCALE_BYTES)
    scale = flat[:SCALE_BYTES].view(torch.float32)
    return flat[SCALE_BYTES:].view(torch.float16).float().mul_(scale)


def _encode_int8(tensor: torch.Tensor, nbytes: int) -> memoryview:
    out = torch.empty(nbytes, dtype=torch.uint8)
    row_total = row_count(tuple(tensor.shape))
    if row_total:
        scales, levels = scaled_levels(tensor.reshape(row_total, -1).float(), _INT8_MAX)
        out[: SCALE_BYTES * row_total].view(torch.float32).copy_(scales)
        out[SCALE_BYTES * row_total :].view(torch.int8).copy_(levels.reshape(-1))
    return out.numpy().data


def _decode_int8(view: memoryview, row_total: int) -> torch.Tensor:
    flat = _as_tensor(view, alignment=SCALE_BYTES)
    scales = flat[: SCALE_BYTES * row_total].view(torch.float32)
    levels = flat[SCALE_BYTES * row_total :].view(torch.int8).reshape(row_total, -1)
    return levels.float().mul_(scales.unsqueeze(1))


def _encode_int4(tensor: torch.Tensor, nbytes: int) -> memoryview:
    out = torch.empty(nbytes, dtype=torch.uint8)
    shape = tuple(tensor.shape)
    if row_total := row_count(shape):
        scales, packed = pack_int4(tensor.reshape(row_total, row_width(shape)).float())
        scale_bytes = SCALE_BYTES * scales.numel()
        out[:scale_bytes].view(torch.float32).copy_(scales.reshape(-1))
        out[scale_bytes:].copy_(packed.reshape(-1))
    return out.numpy().data


def _decode_int4(view: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
    flat = _as_tensor(view, alignment=SCALE_BYTES)
    row_total, width = row_count(shape), row_width(shape)
    scale_bytes = SCALE_BYTES * row_total * group_count(width)
    scales = flat[:scale_bytes].view(torch.float32).reshape(row_total, -1)
    return unpack_int4(scales, flat[scale_bytes:].reshape(row_total, -1), width)


def scaled_levels(rows: torch.Tensor, largest_level: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, D] as whole numbers of -`largest_level`..`largest_level` [N, D] times a scale each [N], both float32.

    A row that holds something not finite gets the scale NaN.
    """
    largest = torch.maximum(rows.amax(1), -rows.amin(1))
    # Rows whose scale would be no normal number count as zero: dividing by it would be inexact or infinite.
    scales = torch.where(largest < largest_level * _TINY, torch.zeros(()), largest / largest_level)
    scales = torch.where(largest.isfinite(), scales, torch.full((), math.nan))
    divisors = torch.where(scales > 0, scales, torch.full((), math.inf))
    return scales, rows.div(divisors.unsqueeze(1)).round_().nan_to_num_(0.0)


def pack_int4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows [N, D] as scales [N, groups] (float32) and two elements a byte [N, half of D] (uint8)."""
    row_total, width = rows.shape
    groups = group_count(width)
    padded = torch.nn.functional.pad(rows, (0, groups * GROUP_ELEMENTS - width))
    scales, levels = scaled_levels(padded.reshape(-1, GROUP_ELEMENTS), _INT4_MAX)
    nibbles = levels.add_(_INT4_ZERO).to(torch.uint8).reshape(row_total, -1)
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return scales.reshape(row_total, groups), packed[:, : packed_bytes(width)]


def unpack_int4(scales: torch.Tensor, packed: torch.Tensor, width: int) -> torch.Tensor:
    """The float32 rows [N, D] that `pack_int4` packed."""
    row_total, groups = scales.shape
    rows = torch.empty(row_total, groups * GROUP_ELEMENTS)
    kept = packed.shape[1] * 2
    rows[:, 0:kept:2] = packed & 15
    rows[:, 1:kept:2] = packed >> 4
    rows[:, kept:] = _INT4_ZERO
    rows.sub_(_INT4_ZERO).view(row_total, groups, GROUP_ELEMENTS).mul_(scales.unsqueeze(2))
    return rows[:, :width]


def _as_tensor(view: memoryview, *, alignment: int) -> torch.Tensor:
    """Bytes as a flat uint8 tensor over the same memory, copied only if read-only or badly aligned."""
    array = np.frombuffer(view, np.uint8)
    if view.readonly or array.ctypes.data % alignment:
        array = array.copy()
    return torch.from_numpy(array)
