"""`encode` and `decode`: a tensor and the bytes that a frame carries.

| codec | bytes | error |
|---|---|---|
| `raw` | as in memory | none |
| `fp16` | a float32 scale, then float16 | 2^-11 of each element, 2^-39 of the largest for the smallest ones |
| `int8` | a float32 scale per row, then int8 | half of 1/127 of each row's largest element |

`fp16` first multiplies by a power of two (exact) that brings the largest element just below float16's largest, so
gradients of 1e-9 or 1e9 neither vanish nor overflow. What is not finite stays visible: `fp16` carries it, in `int8` its
row becomes NaN.
"""

import math
from typing import Literal

import numpy as np
import torch

from coterie.errors import ProtocolError
from coterie.transport.frame import Buffer, TensorSpec
from coterie.transport.limits import ITEM_BYTES, SCALE_BYTES, row_count, wire_bytes

Codec = Literal["raw", "fp16", "int8"]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FP16_EXPONENT = 15
"""The largest element is scaled into [2^14, 2^15); float16 ends at 65504."""
_MAX_SHIFT = 126
"""2^±126 are normal float32 numbers."""
_INT8_MAX = 127
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
        rows = tensor.reshape(row_total, -1).float()
        largest = torch.maximum(rows.amax(1), -rows.amin(1))
        # Rows whose scale would be no normal number count as zero: dividing by it would be inexact or infinite.
        scales = torch.where(largest < _INT8_MAX * _TINY, torch.zeros(()), largest / _INT8_MAX)
        scales = torch.where(largest.isfinite(), scales, torch.full((), math.nan))
        divisors = torch.where(scales > 0, scales, torch.full((), math.inf))
        levels = rows.div(divisors.unsqueeze(1)).round_().nan_to_num_(0.0)
        out[: SCALE_BYTES * row_total].view(torch.float32).copy_(scales)
        out[SCALE_BYTES * row_total :].view(torch.int8).copy_(levels.reshape(-1))
    return out.numpy().data


def _decode_int8(view: memoryview, row_total: int) -> torch.Tensor:
    flat = _as_tensor(view, alignment=SCALE_BYTES)
    scales = flat[: SCALE_BYTES * row_total].view(torch.float32)
    levels = flat[SCALE_BYTES * row_total :].view(torch.int8).reshape(row_total, -1)
    return levels.float().mul_(scales.unsqueeze(1))


def _as_tensor(view: memoryview, *, alignment: int) -> torch.Tensor:
    """Bytes as a flat uint8 tensor over the same memory, copied only if read-only or badly aligned."""
    array = np.frombuffer(view, np.uint8)
    if view.readonly or array.ctypes.data % alignment:
        array = array.copy()
    return torch.from_numpy(array)
