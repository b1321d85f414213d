"""How a frozen matrix is held, sent and counted: in bfloat16, or as whole numbers with a scale per block.

A matrix `x.weight` then is no parameter but parts, plain tensors with names of their own: `x.weight/packed` and, in 8
and 4 bits, `x.weight/scales`. They are made once, where the model is read; workers receive and hold them as they are.
"""

import functools
from collections.abc import Iterable, Mapping

import msgspec
import torch
from torch import nn

from coterie.jobs.model_spec import FrozenDtype, ModelSpec
from coterie.models.adapters import is_transposed
from coterie.models.anatomy import describe
from coterie.models.block_quantizer import (
    BLOCK_OF_INT4,
    BLOCK_OF_INT8,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
)
from coterie.models.skeleton import empty_model
from coterie.models.weights import WeightStore

PACKED = "/packed"
SCALES = "/scales"
"""Endings of a part's name; no model has a slash in a parameter's."""

_FLOAT32_BYTES = 4
_OTHER_LINEARS = frozenset({"FalconLinear"})
"""Classes that compute just what `nn.Linear` does."""


class FrozenMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer's weight that is held in parts.

    Attributes:
        name: Of the weight, as in `Anatomy.unit_of`.
        unit: The block's unit.
        shape: [out, in], or [in, out] if `transposed`.
        transposed: GPT-2's layers hold their weight so.
        dtype: How it is held.
    """

    name: str
    unit: int
    shape: tuple[int, ...]
    transposed: bool
    dtype: FrozenDtype

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each part, by its name."""
        count = torch.Size(self.shape).numel()
        match self.dtype:
            case "int8":
                codes, blocks = self.shape, -(-count // BLOCK_OF_INT8)
            case "int4":
                blocks = -(-count // BLOCK_OF_INT4)
                codes = (blocks * BLOCK_OF_INT4 // 2,)
            case _:
                return {self.name + PACKED: (torch.bfloat16, self.shape)}
        return {self.name + PACKED: (torch.uint8, codes), self.name + SCALES: (torch.float32, (blocks,))}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.parts.values())

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a float32 weight [`shape`] on the CPU, by name; equal on every machine."""
        match self.dtype:
            case "int8":
                packed, scales = quantize_int8(weight)
            case "int4":
                packed, scales = quantize_int4(weight)
            case _:
                return {self.name + PACKED: weight.to(torch.bfloat16)}
        return {self.name + PACKED: packed, self.name + SCALES: scales}

    def unpack(
        self, packed: torch.Tensor, scales: torch.Tensor | None, levels: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """The weight [`shape`] in `dtype`, a new tensor; `levels`: see `dequantize_int8`."""
        match self.dtype:
            case "int8":
                assert scales is not None
                assert levels is not None
                return dequantize_int8(packed, scales, levels, dtype)
            case "int4":
                assert scales is not None
                return dequantize_int4(packed, scales, self.shape, dtype)
            case _:
                return packed.to(dtype)


@functools.lru_cache(maxsize=8)
def frozen_matrices(spec: ModelSpec) -> Mapping[str, FrozenMatrix]:
    """The weights that a spec holds in parts, by name: of linear layers inside blocks, where the weight is not trained.

    Embeddings, output layer, norms and biases stay float32, and so do experts that a model keeps as one tensor. What is
    adapted counts as frozen: adapters are parameters of their own.
    """
    if spec.frozen_dtype == "float32":
        return {}
    anatomy = describe(spec)
    trained = anatomy.trainable_names
    shared = frozenset(anatomy.slots.values())
    found: dict[str, FrozenMatrix] = {}
    for module_name, module in empty_model(spec).named_modules():
        name = f"{module_name}.weight"
        unit = anatomy.unit_of.get(name, 0)
        if not _is_linear(module) or not 0 < unit < anatomy.unit_count - 1 or name in trained or name in shared:
            continue
        found[name] = FrozenMatrix(
            name=name,
            unit=unit,
            shape=anatomy.shapes[name],
            transposed=is_transposed(module),
            dtype=spec.frozen_dtype,
        )
    return found


def held_names(spec: ModelSpec, names: Iterable[str]) -> list[str]:
    """Parameter names with those of frozen matrices replaced by the names of their parts: what a stage is given."""
    matrices = frozen_matrices(spec)
    return [part for name in names for part in (matrices[name].parts if name in matrices else (name,))]


def held_bytes(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of one parameter [shape] as a stage holds it."""
    matrix = frozen_matrices(spec).get(name)
    return _FLOAT32_BYTES * torch.Size(shape).numel() if matrix is None else matrix.nbytes


class PackedWeights:
    """A `WeightStore` over another: gives frozen matrices in parts, packed when asked for, one at a time."""

    def __init__(self, weights: WeightStore, spec: ModelSpec) -> None:
        self._weights = weights
        self._matrix_of = {part: matrix for matrix in frozen_matrices(spec).values() for part in matrix.parts}

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `WeightStore.get`; names may be those of parts (`held_names`)."""
        wanted = list(names)
        result = self._weights.get([name for name in wanted if name not in self._matrix_of])
        for name in wanted:
            if name in self._matrix_of and name not in result:
                matrix = self._matrix_of[name]
                parts = matrix.pack(self._weights.get([matrix.name])[matrix.name])
                result |= {part: tensor for part, tensor in parts.items() if part in set(wanted)}
        return result


def _is_linear(module: nn.Module) -> bool:
    """Only layers whose forward is known: subclasses may compute anything."""
    return type(module) is nn.Linear or type(module).__name__ in _OTHER_LINEARS or is_transposed(module)
