"""Shares as graphs of MNN's own operations, with the gradients that its training module makes.

Only raw operations of `_mnncengine._expr`: the wrappers of `MNN.expr` slip in casts, which have no gradient.
"""

import functools
import math
from typing import Any

import _mnncengine._expr as ops
import numpy as np
import numpy.typing as npt
from MNN import optim

from coterie.backends.checks import added_widths, weight_shapes
from coterie.backends.shares import (
    Activation,
    Array,
    AttentionInputs,
    AttentionShape,
    Gradients,
    Inputs,
    Need,
    NeuronShape,
    Outputs,
    Rotary,
    Shape,
)
from coterie.errors import BackendError

LEAST_BIAS = -1e30
"""Stands for anything below: the least float32 plus a negative score would be minus infinity."""

Sizes = tuple[tuple[str, tuple[int, ...]], ...]


def sizes_of(inputs: Inputs) -> Sizes:
    """What a graph depends on besides its share: which inputs there are, and how large."""
    sizes = {"x": inputs.x.shape} | {f".{name}": array.shape for name, array in inputs.added.items()}
    if isinstance(inputs, AttentionInputs):
        for name, array in (("bias", inputs.bias), ("cos", inputs.cos), ("keep", inputs.keep)):
            if array is not None:
                sizes[name] = array.shape
    return tuple(sorted(sizes.items()))


class Graph:
    """One share's forward for inputs of one size, and the backwards that were asked for.

    MNN reads variables lazily: writing an input makes everything above it be computed again when it is read.
    """

    def __init__(self, shape: Shape, sizes: Sizes) -> None:
        self._shape = shape
        self._sizes = dict(sizes)
        self._rows, self._tokens = self._sizes["x"][:2]
        self._weights = {name: _variable(size) for name, size in weight_shapes(shape).items()}
        flat = self._rows * self._tokens
        self._x = _variable((flat, shape.hidden))
        widths = added_widths(shape)
        self._added = {name[1:]: _variable((flat, widths[name[1:]])) for name in self._sizes if name[0] == "."}
        self._tables: dict[str, Any] = {}
        self._mask: Any = None
        self._keep: Any = None
        if isinstance(shape, AttentionShape):
            self._inner = self._attention(shape)
            second = self._weights["wo"]
        else:
            self._inner = self._neurons(shape)
            second = self._weights["w2"]
        self._y = _product(self._inner, second, turned=True)
        self._inner_width = second_width(shape)
        self._above = _variable((flat, shape.output))
        self._inner_above = _variable((flat, self._inner_width))
        self._backwards: dict[tuple[Need, bool], Any] = {}

    def write(self, inputs: Inputs) -> None:
        """Give a micro-batch."""
        self._x.write(_flat(inputs.x))
        for name, variable in self._added.items():
            variable.write(_flat(inputs.added[name]))
        if not isinstance(inputs, AttentionInputs):
            return
        shape = self._shape
        assert isinstance(shape, AttentionShape)
        if inputs.bias is not None:
            self._mask.write(np.maximum(inputs.bias, np.float32(LEAST_BIAS)))
        if inputs.keep is not None:
            self._keep.write(inputs.keep * np.float32(inputs.keep_scale))
        for name, rest in (("cos", 1.0), ("sin", 0.0)):
            if name in self._tables:
                self._tables[name].write(_full_table(getattr(inputs, name), shape.head_dim, rest))

    def write_weights(self, weights: dict[str, Array]) -> None:
        """Give the weights."""
        for name, variable in self._weights.items():
            variable.write(weights[name])

    def outputs(self, *, inner: bool) -> Outputs:
        """Compute the forward."""
        y = self._read(self._y, self._shape.output)
        return Outputs(y=y, inner=self._read(self._inner, self._inner_width) if inner else None)

    def gradients(self, above: Array, need: Need, inner_above: Array | None) -> Gradients:
        """Compute a backward; MNN computes the forward again for it."""
        targets = self._targets(need)
        if not targets:
            return Gradients()
        self._above.write(_flat(above))
        if inner_above is not None:
            self._inner_above.write(_flat(inner_above))
        which = (need, inner_above is not None)
        if which not in self._backwards:
            self._backwards[which] = self._backward(targets, inner=which[1])
        values = np.array(self._backwards[which].read(), np.float32).reshape(-1)
        arrays: dict[str, Array] = {}
        offset = 0
        for name, (_, size) in targets.items():
            count = math.prod(size)
            arrays[name] = values[offset : offset + count].reshape(size)
            offset += count
        if offset != values.size:
            raise BackendError(f"MNN gave {values.size} numbers of gradients instead of {offset}")
        return Gradients(
            x=arrays.get("x"),
            weights={name: array for name, array in arrays.items() if name in self._weights},
            added={name[1:]: array for name, array in arrays.items() if name[0] == "."},
        )

    def _targets(self, need: Need) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """What gets a gradient, with the size that it is given in."""
        targets: dict[str, tuple[Any, tuple[int, ...]]] = {"x": (self._x, self._sizes["x"])} if need.x else {}
        if need.weights:
            sizes = weight_shapes(self._shape)
            targets |= {name: (variable, sizes[name]) for name, variable in self._weights.items()}
        if need.added:
            targets |= {f".{name}": (variable, self._sizes[f".{name}"]) for name, variable in self._added.items()}
        return targets

    def _backward(self, targets: dict[str, tuple[Any, tuple[int, ...]]], *, inner: bool) -> Any:
        """All gradients as one variable: read one by one they would compute what they share again and again."""
        outputs, above = [self._y], [self._above]
        if inner:
            outputs, above = [_joined([self._y, self._inner])], [_joined([self._above, self._inner_above])]
        _, gradients = optim.Grad().grad(outputs, above, [variable for variable, _ in targets.values()])
        if len(gradients) != len(targets):  # MNN leaves out silently what it cannot differentiate
            raise BackendError(f"MNN made {len(gradients)} of {len(targets)} gradients")
        return _joined(list(gradients))

    def _read(self, variable: Any, width: int) -> Array:
        return np.array(variable.read(), np.float32).reshape(self._rows, self._tokens, width)

    def _first(self, weight: str, bias: str, added: str) -> Any:
        result = _product(self._x, self._weights[weight], turned=True)
        if bias in self._weights:
            result = ops.add(result, self._weights[bias])
        return ops.add(result, self._added[added]) if added in self._added else result

    def _heads(self, name: str, heads: int, head_dim: int) -> Any:
        """A projection as [B,heads,T,d], turned if it has to be."""
        flat = self._first(f"w{name}", f"b{name}", name)
        return ops.transpose(_reshape(flat, self._rows, self._tokens, heads, head_dim), [0, 2, 1, 3])

    def _attention(self, shape: AttentionShape) -> Any:
        """Heads of a group are side by side on the query axis, so that nothing is repeated for them."""
        rows, tokens, dim = self._rows, self._tokens, shape.head_dim
        q = self._heads("q", shape.heads, dim)
        k, v = self._heads("k", shape.groups, dim), self._heads("v", shape.groups, dim)
        if shape.rotary != "none":
            table = (self._sizes["cos"][0], 1, tokens, dim)
            self._tables = {"cos": _variable(table), "sin": _variable(table)}
            partner = _constant(partner_matrix(dim, shape.rotary_dims, shape.rotary))
            q, k = self._turned(q, partner, shape.heads), self._turned(k, partner, shape.groups)
        each = shape.heads // shape.groups
        scores = _product(_reshape(q, rows, shape.groups, each * tokens, dim), k, turned=True)
        scores = ops.multiply(_reshape(scores, rows, shape.heads, tokens, tokens), _number(shape.scale))
        if "bias" in self._sizes:
            self._mask = _variable(self._sizes["bias"])
            scores = ops.add(scores, self._mask)
        probabilities = ops.softmax(scores, 3)
        if "keep" in self._sizes:
            self._keep = _variable(self._sizes["keep"])
            probabilities = ops.multiply(probabilities, self._keep)
        mixed = _product(_reshape(probabilities, rows, shape.groups, each * tokens, tokens), v)
        by_token = ops.transpose(_reshape(mixed, rows, shape.heads, tokens, dim), [0, 2, 1, 3])
        return _reshape(by_token, rows * tokens, shape.heads * dim)

    def _turned(self, x: Any, partner: Any, heads: int) -> Any:
        flat = _reshape(x, self._rows * heads * self._tokens, x.shape[-1])
        other = _reshape(_product(flat, partner), *x.shape)
        return ops.add(ops.multiply(x, self._tables["cos"]), ops.multiply(other, self._tables["sin"]))

    def _neurons(self, shape: NeuronShape) -> Any:
        up = self._first("w1", "b1", "up")
        if not shape.gated:
            return activated(up, shape.activation)
        return ops.multiply(activated(self._first("wg", "bg", "gate"), shape.activation), up)


def second_width(shape: Shape) -> int:
    """How many numbers a token has that go into the second product."""
    return shape.heads * shape.head_dim if isinstance(shape, AttentionShape) else shape.neurons


def activated(x: Any, activation: Activation) -> Any:
    """The function out of operations that have gradients."""
    if activation == "relu":
        return ops.relu(x, 0.0)
    if activation == "silu":
        return ops.multiply(x, ops.sigmoid(x))
    half = ops.multiply(x, _number(0.5))
    if activation == "gelu":
        return ops.multiply(half, ops.add(ops.erf(ops.multiply(x, _number(2**-0.5))), _number(1)))
    cube = ops.multiply(ops.multiply(x, x), x)
    bent = ops.multiply(ops.add(x, ops.multiply(cube, _number(0.044715))), _number((2 / math.pi) ** 0.5))
    return ops.multiply(half, ops.add(ops.tanh(bent), _number(1)))


@functools.lru_cache(maxsize=32)
def partner_matrix(head_dim: int, turned: int, rotary: Rotary) -> Array:
    """[d,d]: what a head's numbers are multiplied with to put each one's partner, with its sign, in its place."""
    matrix = np.zeros((head_dim, head_dim), np.float32)
    for pair in range(turned // 2):
        low, high = (pair, pair + turned // 2) if rotary == "half" else (2 * pair, 2 * pair + 1)
        matrix[high, low], matrix[low, high] = -1, 1
    return matrix


def _full_table(table: Array, head_dim: int, rest: float) -> Array:
    """[B or 1, T, R] as [B or 1, 1, T, d]: numbers that are not turned stay as they are."""
    full = np.full((table.shape[0], 1, table.shape[1], head_dim), rest, np.float32)
    full[..., : table.shape[2]] = table[:, None]
    return full


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array.reshape(-1, array.shape[-1]))


def _variable(size: tuple[int, ...]) -> Any:
    """Written at once: a variable without numbers makes gradients fail."""
    variable = ops.placeholder(list(size), ops.NCHW, ops.float)
    variable.write(np.zeros(size, np.float32))
    return variable


def _constant(array: npt.NDArray[np.float32]) -> Any:
    return ops.const(array, list(array.shape), ops.NCHW, ops.float)


def _number(value: float) -> Any:
    return _constant(np.full(1, value, np.float32))


def _reshape(x: Any, *size: int) -> Any:
    return ops.reshape(x, list(size), ops.NCHW)


def _product(left: Any, right: Any, *, turned: bool = False) -> Any:
    """Left by right, or by right with its last two axes exchanged."""
    return ops.matmul(left, right, False, turned)  # noqa: FBT003 - MNN's binding takes no names


def _joined(parts: list[Any]) -> Any:
    return ops.concat([_reshape(part, -1) for part in parts], 0)
