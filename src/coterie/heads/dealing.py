"""Dealing a layer out: the weights and inputs of some of its KV groups, or of some of its neurons, and back again."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from coterie.backends.shares import Array, AttentionInputs, AttentionShape, Inputs, NeuronInputs, Shape
from coterie.profiles.backend_profile import Strategy

_ROWS_BY_QUERY, _ROWS_BY_KEY, _COLUMNS_BY_QUERY = ("wq", "bq"), ("wk", "wv", "bk", "bv"), ("wo",)
_ROWS_BY_NEURON, _COLUMNS_BY_NEURON = ("w1", "b1", "wg", "bg"), ("w2",)


def count_of(shape: Shape) -> int:
    """KV groups, or neurons."""
    return shape.groups if isinstance(shape, AttentionShape) else shape.neurons


def part_shape(shape: Shape, count: int) -> Shape:
    """The shape of `count` of a layer's KV groups, or neurons."""
    if isinstance(shape, AttentionShape):
        return msgspec.structs.replace(shape, groups=count, heads=count * (shape.heads // shape.groups))
    return msgspec.structs.replace(shape, neurons=count)


def computed_as(shape: Shape, strategy: Strategy) -> list[Shape]:
    """What a backend computes one after the other: a share at once, or each of its KV groups."""
    count = count_of(shape)
    return [shape] if strategy == "fused" or count == 1 else [part_shape(shape, 1)] * count


def part_weights(shape: Shape, weights: Mapping[str, Array], part: range) -> dict[str, Array]:
    """The weights of the KV groups, or neurons, in `part`: rows are views, columns are copied."""
    return {
        name: np.ascontiguousarray(array[:, _numbers(shape, name, part)])
        if name in _COLUMNS_BY_QUERY + _COLUMNS_BY_NEURON
        else array[_numbers(shape, name, part)]
        for name, array in weights.items()
    }


def part_inputs(shape: Shape, inputs: Inputs, part: range) -> Inputs:
    """What a part needs of a layer's inputs; x is the same for all."""
    if isinstance(inputs, NeuronInputs):
        added = {name: np.ascontiguousarray(one[..., part.start : part.stop]) for name, one in inputs.added.items()}
        return NeuronInputs(x=inputs.x, added=added)
    assert isinstance(shape, AttentionShape)
    each = shape.heads // shape.groups
    heads = slice(part.start * each, part.stop * each)
    bias = inputs.bias
    if bias is not None and bias.shape[1] > 1:
        bias = np.ascontiguousarray(bias[:, heads])
    return msgspec.structs.replace(
        inputs,
        bias=bias,
        keep=None if inputs.keep is None else np.ascontiguousarray(inputs.keep[:, heads]),
        added={
            name: np.ascontiguousarray(one[..., _numbers(shape, f"w{name}", part)])
            for name, one in inputs.added.items()
        },
    )


def part_inner(shape: Shape, inner: Array, part: range) -> Array:
    """A part's columns of what goes into the second product [B,T,H d] or [B,T,n]."""
    name = "wq" if isinstance(shape, AttentionShape) else "w1"
    return np.ascontiguousarray(inner[..., _numbers(shape, name, part)])


def row_of(inputs: Inputs, row: int) -> Inputs:
    """The inputs of one row of the batch."""
    one = slice(row, row + 1)
    added = {name: np.ascontiguousarray(array[one]) for name, array in inputs.added.items()}
    if isinstance(inputs, NeuronInputs):
        return NeuronInputs(x=np.ascontiguousarray(inputs.x[one]), added=added)
    assert isinstance(inputs, AttentionInputs)
    rows = len(inputs.x)

    def own(array: Array | None) -> Array | None:
        return np.ascontiguousarray(array[one]) if array is not None and len(array) == rows else array

    return msgspec.structs.replace(
        inputs,
        x=np.ascontiguousarray(inputs.x[one]),
        bias=own(inputs.bias),
        cos=own(inputs.cos),
        sin=own(inputs.sin),
        keep=None if inputs.keep is None else np.ascontiguousarray(inputs.keep[one]),
        added=added,
    )


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Arrays of all parts, in their order, as those of the layer: weights' gradients, or what `added` gets."""
    if len(parts) == 1:
        return dict(parts[0])
    columns = _COLUMNS_BY_QUERY + _COLUMNS_BY_NEURON
    weights = (*_ROWS_BY_QUERY, *_ROWS_BY_KEY, *_ROWS_BY_NEURON)
    return {
        name: np.concatenate([part[name] for part in parts], axis=0 if name in weights else 1 if name in columns else 2)
        for name in parts[0]
    }


def _numbers(shape: Shape, name: str, part: range) -> slice:
    """Which rows or columns of a weight belong to a part."""
    if not isinstance(shape, AttentionShape):
        return slice(part.start, part.stop)
    each = 1 if name in _ROWS_BY_KEY else shape.heads // shape.groups
    width = each * shape.head_dim
    return slice(part.start * width, part.stop * width)
