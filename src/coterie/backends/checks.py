"""What every backend refuses before it computes: arrays that are not those of the share."""

from collections.abc import Mapping

import numpy as np

from coterie.backends.shares import Array, AttentionInputs, AttentionShape, Inputs, NeuronShape, Shape
from coterie.errors import BackendError


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The weights that a share has, by name, with their shapes."""
    if isinstance(shape, AttentionShape):
        queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "wq": (queries, shape.hidden),
            "wk": (keys, shape.hidden),
            "wv": (keys, shape.hidden),
            "wo": (shape.output, queries),
        }
        return sizes | ({"bq": (queries,), "bk": (keys,), "bv": (keys,)} if shape.biased else {})
    sizes = {"w1": (shape.neurons, shape.hidden), "w2": (shape.output, shape.neurons)}
    if shape.gated:
        sizes["wg"] = (shape.neurons, shape.hidden)
    if shape.biased:
        sizes |= {"b1": (shape.neurons,)} | ({"bg": (shape.neurons,)} if shape.gated else {})
    return sizes


def added_widths(shape: Shape) -> dict[str, int]:
    """Which projections may get something added, and how wide they are."""
    if isinstance(shape, AttentionShape):
        keys = shape.groups * shape.head_dim
        return {"q": shape.heads * shape.head_dim, "k": keys, "v": keys}
    return {"up": shape.neurons} | ({"gate": shape.neurons} if shape.gated else {})


def check_weights(shape: Shape, weights: Mapping[str, Array]) -> None:
    """Refuse weights of other names or sizes, or not in contiguous float32.

    Raises:
        BackendError: One is wrong; it is named.
    """
    wanted = weight_shapes(shape)
    if weights.keys() != wanted.keys():
        raise BackendError(f"a share has the weights {', '.join(wanted)}, and got {', '.join(weights)}")
    for name, size in wanted.items():
        array = weights[name]
        if array.shape != size or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise BackendError(
                f"the weight {name} of a share must be contiguous float32 {size}, and is {array.dtype} {array.shape}"
            )


def check_inputs(shape: Shape, inputs: Inputs) -> None:
    """Refuse inputs that do not belong to the share.

    Raises:
        BackendError: One has another size; it is named.
    """
    if isinstance(shape, AttentionShape) != isinstance(inputs, AttentionInputs):
        raise BackendError(f"{type(inputs).__name__} were given to a share of {type(shape).__name__}")
    if inputs.x.ndim != 3 or inputs.x.shape[2] != shape.hidden:
        raise BackendError(f"what goes in must be [B,T,{shape.hidden}], and is {inputs.x.shape}")
    rows, tokens = inputs.x.shape[:2]
    widths = added_widths(shape)
    for name, array in inputs.added.items():
        if name not in widths or array.shape != (rows, tokens, widths[name]):
            raise BackendError(f"{name} {array.shape} cannot be added to projections of widths {widths}")
    if isinstance(shape, AttentionShape) and isinstance(inputs, AttentionInputs):
        _check_attention(shape, inputs, rows, tokens)


def _check_attention(shape: AttentionShape, inputs: AttentionInputs, rows: int, tokens: int) -> None:
    heads = shape.heads
    if inputs.bias is not None:
        allowed = ((1, rows), (1, heads), (1, tokens), (tokens,))
        if inputs.bias.ndim != len(allowed) or any(n not in a for n, a in zip(inputs.bias.shape, allowed, strict=True)):
            raise BackendError(f"a bias of {inputs.bias.shape} does not spread over {(rows, heads, tokens, tokens)}")
    if inputs.keep is not None and inputs.keep.shape != (rows, heads, tokens, tokens):
        raise BackendError(f"the dropout mask is {inputs.keep.shape}, and must be {(rows, heads, tokens, tokens)}")
    if shape.rotary == "none":
        return
    for name, table in (("cos", inputs.cos), ("sin", inputs.sin)):
        sizes = ((1, tokens, shape.rotary_dims), (rows, tokens, shape.rotary_dims))
        if table is None or table.shape not in sizes:
            found = "absent" if table is None else str(table.shape)
            raise BackendError(f"{name} of the positions must be {sizes[0]} or {sizes[1]}, and is {found}")


def check_shape(shape: Shape) -> None:
    """Refuse shares that are none.

    Raises:
        BackendError: Heads do not go into groups, or more numbers are turned than a head has.
    """
    if isinstance(shape, NeuronShape):
        if shape.neurons < 1:
            raise BackendError(f"a share of {shape.neurons} neurons")
        return
    if shape.groups < 1 or shape.heads < 1 or shape.heads % shape.groups:
        raise BackendError(f"{shape.heads} heads do not go into {shape.groups} groups")
    if shape.rotary != "none" and (shape.rotary_dims % 2 or not 0 < shape.rotary_dims <= shape.head_dim):
        raise BackendError(f"{shape.rotary_dims} of {shape.head_dim} numbers of a head cannot be turned in pairs")
