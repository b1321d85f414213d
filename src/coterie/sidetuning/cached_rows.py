"""One cached position as bytes: the activations of all its layers, in the type that the cache stores.

| stored as | bytes of a position, L layers of width D | error of an element |
|---|---|---|
| `float32` | 4 L D | none |
| `float16` | L (4 + 2 D) | 2^-11 of it, or 2^-25 if it is below 2^-14 (times the scale) |
| `int8` | L (4 + D) | half of 1/127 of the largest in its layer |
| `int4` | L (4 ⌈D/64⌉ + ⌈D/2⌉) | half of 1/7 of the largest in its group of 64 |

The 4 is a float32 scale. In `float16` it is 1 unless a layer's largest element would not fit, then a power of
two. A position's bytes depend on nothing but its own numbers, so it does not matter in which batch a sample came.
"""

from typing import TypeVar, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.jobs.side_spec import UploadDtype
from coterie.tensors.codecs import pack_int4, scaled_levels, unpack_int4
from coterie.transport.limits import SCALE_BYTES, group_count, packed_bytes

_INT8_MAX = 127
_FITS_BELOW = 2.0**15
_FITS_FROM = 2.0**-9
"""A layer whose largest element is in between is stored unscaled: float16 errs by 2^-16 of that element at most."""
_ALIGNMENT = 4
"""Rows start where a float32 may: positions are read without a copy."""

_Rows = TypeVar("_Rows", Tensor, NDArray[np.uint8])


class RowCoder:
    """Turns positions [N, L, D] (float32) into rows of bytes [N, `row_bytes`] (uint8), and back.

    Args:
        layers: L.
        width: D.
        dtype: What is stored.
    """

    def __init__(self, layers: int, width: int, dtype: UploadDtype) -> None:
        self._layers = layers
        self._width = width
        self._dtype = dtype
        scales = {"float32": 0, "float16": 1, "int8": 1, "int4": group_count(width)}[dtype]
        element_bytes = {"float32": 4 * width, "float16": 2 * width, "int8": width, "int4": packed_bytes(width)}[dtype]
        self._scale_bytes = SCALE_BYTES * scales * layers
        self._element_bytes = element_bytes * layers
        used = self._scale_bytes + self._element_bytes
        self.row_bytes = -(-used // _ALIGNMENT) * _ALIGNMENT

    def encode(self, taps: Tensor) -> Tensor:
        """Rows [N, `row_bytes`] of finite float32 activations [N, L, D]."""
        rows = torch.zeros(taps.shape[0], self.row_bytes, dtype=torch.uint8)
        if not taps.numel():
            return rows
        scales, elements = self._scales(rows), self._elements(rows)
        flat = taps.reshape(-1, self._width)
        match self._dtype:
            case "float32":
                elements.view(torch.float32).copy_(taps.reshape(taps.shape[0], -1))
            case "float16":
                factors = _float16_scales(flat)
                _put(scales.view(torch.float32), factors)
                _put(elements.view(torch.float16), flat.div(factors.unsqueeze(1)))
            case "int8":
                factors, levels = scaled_levels(flat, _INT8_MAX)
                _put(scales.view(torch.float32), factors)
                _put(elements.view(torch.int8), levels)
            case "int4":
                factors, packed = pack_int4(flat)
                _put(scales.view(torch.float32), factors)
                _put(elements, packed)
            case _:
                assert_never(self._dtype)
        return rows

    def decode(self, rows: Tensor) -> Tensor:
        """Float32 activations [N, L, D] of rows [N, `row_bytes`]; of `float32`, a view of the rows where it can be."""
        count = rows.shape[0]
        shape = (count, self._layers, self._width)
        if not count * self._layers:
            return torch.empty(shape)
        # Looked at through NumPy, whose views cost a fifth of torch's: most batches are small.
        scales, elements = self._scales(rows.numpy()).view(np.float32), self._elements(rows.numpy())
        match self._dtype:
            case "float32":
                return torch.from_numpy(elements.view(np.float32)).reshape(shape)
            case "float16":
                taps = torch.from_numpy(elements.view(np.float16)).float().reshape(shape)
                return taps if (scales == 1).all() else taps.mul_(torch.from_numpy(scales).unsqueeze(2))
            case "int8":
                taps = torch.from_numpy(elements.view(np.int8)).float().reshape(shape)
                return taps.mul_(torch.from_numpy(scales).unsqueeze(2))
            case "int4":
                vectors = count * self._layers
                packed = torch.from_numpy(elements.reshape(vectors, -1))
                return unpack_int4(torch.from_numpy(scales.reshape(vectors, -1)), packed, self._width).reshape(shape)
            case _:
                assert_never(self._dtype)

    def _scales(self, rows: _Rows) -> _Rows:
        return rows[:, : self._scale_bytes]

    def _elements(self, rows: _Rows) -> _Rows:
        return rows[:, self._scale_bytes : self._scale_bytes + self._element_bytes]


def _put(place: Tensor, values: Tensor) -> None:
    """Write values [N L, ...] into a part of the rows [N, ...]."""
    place.copy_(values.reshape(place.shape))


def _float16_scales(flat: Tensor) -> Tensor:
    """One power of two [N] for every vector [N, D]: 1, or what brings its largest element to [2^14, 2^15)."""
    largest = torch.maximum(flat.amax(1), -flat.amin(1))
    exponents = torch.frexp(largest).exponent - 15
    fits = (largest < _FITS_BELOW) & (largest >= _FITS_FROM) | (largest == 0)
    # The power from its bits, since torch's own powers may err. 2^-126 is float32's smallest normal number.
    powers = ((exponents.clamp(-126, 126) + 127).to(torch.int32) << 23).view(torch.float32)
    return torch.where(fits, torch.ones(()), powers)
