"""Whether a backend computes what it should: small shares against float64, before it may be used."""

from collections.abc import Iterator

import numpy as np

from coterie.backends.backend import Backend
from coterie.backends.checks import added_widths, weight_shapes
from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.shares import (
    Activation,
    Array,
    AttentionInputs,
    AttentionShape,
    Inputs,
    Need,
    NeuronInputs,
    NeuronShape,
    Shape,
)

TOLERANCE = 1e-4
"""Relative; a backend with more is not used. Those that work are around 1e-6."""

ROWS, TOKENS = 2, 9
ALL = Need(added=True)


def relative_error(got: Array | None, expected: Array | None, *, beside: Array | None = None) -> float:
    """|got - expected| / |expected|, norms of all entries; `beside` is what it is divided by instead."""
    if got is None or expected is None or got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    size = float(np.linalg.norm(expected if beside is None else beside))
    return float(np.linalg.norm(got - expected)) / (size + 1e-30)


def self_test(backend: Backend) -> float:
    """The largest relative error over outputs and all gradients of a few small shares.

    Raises:
        BackendError: The backend cannot compute one of them.
    """
    return max(share_error(backend, shape, inputs) for shape, inputs in _cases())


def share_error(backend: Backend, shape: Shape, inputs: Inputs, *, seed: int = 1) -> float:
    """The largest relative error of one share, everything asked for."""
    draw = np.random.default_rng(seed)
    weights = {name: _normal(draw, *size, scale=size[-1] ** -0.5) for name, size in weight_shapes(shape).items()}
    rows, tokens = inputs.x.shape[:2]
    gradient = _normal(draw, rows, tokens, shape.output)
    width = shape.heads * shape.head_dim if isinstance(shape, AttentionShape) else shape.neurons
    inner_gradient = _normal(draw, rows, tokens, width)
    results = []
    oracle: Backend = NumpyBackend(np.float64)
    for one in (backend, oracle):
        loaded = one.load(shape, weights)
        outputs, saved = one.forward(loaded, inputs, inner=True)
        results.append((outputs, one.backward(saved, gradient, ALL, inner_gradient=inner_gradient)))
        loaded.release()
    (outputs, grads), (right, right_grads) = results
    errors = [relative_error(outputs.y, right.y), relative_error(outputs.inner, right.inner)]
    errors.append(relative_error(grads.x, right_grads.x))
    for name, expected in right_grads.weights.items():
        # A softmax takes no notice of the keys' bias: its gradient is zero but for rounding.
        beside = right_grads.weights["bq"] if name == "bk" else None
        errors.append(relative_error(grads.weights.get(name), expected, beside=beside))
    errors += [relative_error(grads.added.get(name), expected) for name, expected in right_grads.added.items()]
    return max(errors)


def _cases() -> Iterator[tuple[Shape, Inputs]]:
    draw = np.random.default_rng(0)
    x = _normal(draw, ROWS, TOKENS, 24)
    least = np.finfo(np.float32).min
    padding = np.zeros((ROWS, 1, 1, TOKENS), np.float32)
    padding[1, ..., -3:] = least
    causal = np.triu(np.full((TOKENS, TOKENS), least, np.float32), 1)[None, None]
    plain = AttentionShape(hidden=24, output=20, head_dim=8, heads=3, groups=3, scale=8**-0.5)
    yield plain, AttentionInputs(x=x, bias=padding, added=_added(draw, plain))
    angles = draw.uniform(0, 6, (1, TOKENS, 4)).astype(np.float32)
    tables = np.concatenate([angles, angles], -1)
    turned = AttentionShape(
        hidden=24, output=24, head_dim=12, heads=4, groups=2, scale=0.3, biased=False, rotary="half", rotary_dims=8
    )
    keep = (draw.random((ROWS, 4, TOKENS, TOKENS)) > 0.2).astype(np.uint8)
    yield turned, AttentionInputs(x=x, bias=causal, cos=np.cos(tables), sin=np.sin(tables), keep=keep, keep_scale=1.25)
    kinds: tuple[tuple[Activation, bool, bool], ...] = (
        ("gelu", False, True),
        ("gelu_tanh", False, True),
        ("silu", True, False),
        ("relu", False, False),
    )
    for activation, gated, biased in kinds:
        neurons = NeuronShape(
            hidden=24,
            output=24,
            neurons=37,
            activation=activation,
            gated=gated,
            biased=biased,
        )
        yield neurons, NeuronInputs(x=x, added=_added(draw, neurons))


def _added(draw: np.random.Generator, shape: Shape) -> dict[str, Array]:
    return {name: _normal(draw, ROWS, TOKENS, width, scale=0.3) for name, width in added_widths(shape).items()}


def _normal(draw: np.random.Generator, *size: int, scale: float = 1.0) -> Array:
    return (draw.standard_normal(size) * scale).astype(np.float32)
