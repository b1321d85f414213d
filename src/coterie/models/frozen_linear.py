"""A linear layer whose weight is frozen and held in parts; a stage or a whole model gets them in its layers' places."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from coterie.errors import ModelError
from coterie.models.adapters import clean_name
from coterie.models.block_quantizer import int8_levels, load_bitsandbytes
from coterie.models.frozen_weights import PACKED, SCALES, FrozenMatrix
from coterie.models.weights import WeightStore


class FrozenLinear(nn.Module):
    """Computes what the layer did whose weight it holds. The weight exists in full only while it is multiplied with.

    Its parts are buffers, so that they belong to no parameter count, optimizer or checkpoint. The bias is the former
    layer's parameter, trained or not.
    """

    packed: torch.Tensor
    scales: torch.Tensor | None
    levels: torch.Tensor | None

    def __init__(self, matrix: FrozenMatrix, bias: nn.Parameter | None, parts: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.matrix = matrix
        rows, columns = matrix.shape
        self.in_features, self.out_features = (rows, columns) if matrix.transposed else (columns, rows)
        packed = parts[matrix.name + PACKED]
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", parts.get(matrix.name + SCALES), persistent=False)
        levels = int8_levels().to(packed.device) if matrix.dtype == "int8" else None
        self.register_buffer("levels", levels, persistent=False)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in float32, [out, in] or as the former layer held it, made anew: for code that looks at it."""
        return self.unpacked(torch.float32)

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """What it holds, named as in `FrozenMatrix.parts`."""
        parts = {self.matrix.name + PACKED: self.packed}
        if self.scales is not None:
            parts[self.matrix.name + SCALES] = self.scales
        return parts

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`, as the former layer held it."""
        return self.matrix.unpack(self.packed, self.scales, self.levels, dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        result: torch.Tensor = _FrozenProduct.apply(inputs, self.bias, self)  # type: ignore[no-untyped-call] # torch's
        return result


class _FrozenProduct(torch.autograd.Function):
    """The product with a frozen weight. Keeps nothing for backward, which unpacks the weight again."""

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: torch.Tensor, bias: torch.Tensor | None, layer: FrozenLinear) -> torch.Tensor:
        """Inputs [..., in] to [..., out], in autocast's type if it is on."""
        ctx.layer = layer  # type: ignore[attr-defined] # torch's way to hand things to backward
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        return functional.linear(inputs, _out_by_in(layer, dtype), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Gradient [..., out] to the inputs' [..., in], and to the bias's [out]."""
        layer: FrozenLinear = ctx.layer  # type: ignore[attr-defined] # see forward
        needs_inputs, needs_bias, _ = ctx.needs_input_grad  # type: ignore[attr-defined] # torch's own
        to_inputs = gradient @ _out_by_in(layer, gradient.dtype) if needs_inputs else None
        to_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if needs_bias else None
        return to_inputs, to_bias, None


def place_frozen(
    model: nn.Module, matrices: Iterable[FrozenMatrix], weights: WeightStore | None, device: torch.device
) -> None:
    """Replaces the layers of `matrices` in a stage or a whole model, PEFT's wrapping or not.

    Args:
        model: Its layers' own weights may be on the meta device; they are dropped.
        matrices: Those of the stage's units.
        weights: Gives their parts; None on the meta device.
        device: Where the parts go.

    Raises:
        ModelError: A part is missing, or of another type or shape than the matrix needs.
        MissingPackageError: `bitsandbytes` is needed and not installed.
    """
    wanted = {matrix.name: matrix for matrix in matrices}
    if any(matrix.dtype in {"int8", "int4"} for matrix in wanted.values()):
        load_bitsandbytes()
    layers = {clean_name(f"{name}.weight"): name for name, _ in model.named_modules()}
    for name, matrix in wanted.items():
        parent_name, _, leaf = layers[name].rpartition(".")
        parent = model.get_submodule(parent_name)
        bias = getattr(parent, leaf).bias
        setattr(parent, leaf, FrozenLinear(matrix, bias, _parts(matrix, weights, device)))


def _parts(matrix: FrozenMatrix, weights: WeightStore | None, device: torch.device) -> dict[str, torch.Tensor]:
    if weights is None:
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in matrix.parts.items()}
    parts = weights.get(matrix.parts)
    for name, (dtype, shape) in matrix.parts.items():
        given = parts[name]
        if given.dtype != dtype or tuple(given.shape) != shape:
            raise ModelError(
                f"{name} is {_said(given.dtype, tuple(given.shape))}, and {matrix.dtype} needs {_said(dtype, shape)}",
                hint="the weights belong to another model, or are held in another way",
            )
    return {name: tensor.to(device) for name, tensor in parts.items()}


def _said(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _out_by_in(layer: FrozenLinear, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in]."""
    weight = layer.unpacked(dtype)
    return weight.T if layer.matrix.transposed else weight
