"""One share's work on one backend, as a run would give it: random weights, a micro-batch, forward and backward."""

from collections.abc import Sequence

import msgspec
import numpy as np

from coterie.backends.backend import Backend, Loaded
from coterie.backends.checks import added_widths, weight_shapes
from coterie.backends.shares import (
    Array,
    AttentionInputs,
    Inputs,
    Need,
    NeuronInputs,
    NeuronShape,
    Shape,
)

_WEIGHT_SCALE = 0.02
"""Like a freshly initialised transformer: neither overflow nor denormal numbers, which would distort timings."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run asks of each share.

    Attributes:
        rows: B, rows of a micro-batch.
        tokens: T, tokens of a row.
        need: Gradients wanted. If those of weights are, weights are sent anew for each micro-batch, since they change.
        causal: The mask is [1,1,T,T] instead of [B,1,1,T].
        dropout: Attention probabilities are dropped, by a mask made in torch.
    """

    rows: int
    tokens: int
    need: Need = Need()
    causal: bool = False
    dropout: bool = False


class ShareWork:
    """Forward and backward of shares, one after another, with everything that is sent for them.

    Args:
        shapes: One share for all heads at once, several for head by head.
        conditions: Of the run.
    """

    def __init__(self, shapes: Sequence[Shape], conditions: Conditions) -> None:
        draw = np.random.default_rng(0)
        x = _draw(draw, conditions.rows, conditions.tokens, shapes[0].hidden)
        self._gradient = _draw(draw, conditions.rows, conditions.tokens, shapes[0].output)
        self._need = conditions.need
        self._shares = [
            (shape, random_weights(draw, shape), random_inputs(draw, shape, x, conditions)) for shape in shapes
        ]
        self._loaded: list[Loaded] = []

    def once(self, backend: Backend) -> None:
        """The work of one micro-batch. Frozen weights stay loaded from the first time on, until `release`."""
        if not self._loaded:
            self._loaded = [backend.load(shape, weights) for shape, weights, _ in self._shares]
        saved = [
            backend.forward(loaded, inputs)[1]
            for loaded, (_, _, inputs) in zip(self._loaded, self._shares, strict=True)
        ]
        for of_forward in saved:
            backend.backward(of_forward, self._gradient, self._need)
        if self._need.weights:
            self.release()

    def release(self) -> None:
        """Give the weights' memory on the backend back. Idempotent."""
        for loaded in self._loaded:
            loaded.release()
        self._loaded = []


def _draw(draw: np.random.Generator, *shape: int) -> Array:
    return draw.standard_normal(shape, dtype=np.float32)


def random_weights(draw: np.random.Generator, shape: Shape) -> dict[str, Array]:
    """Those of a share."""
    return {name: _draw(draw, *size) * np.float32(_WEIGHT_SCALE) for name, size in weight_shapes(shape).items()}


def random_inputs(draw: np.random.Generator, shape: Shape, x: Array, conditions: Conditions) -> Inputs:
    """What a micro-batch gives a share."""
    if isinstance(shape, NeuronShape):
        return NeuronInputs(x=x, added=_added(shape, x, conditions.need))
    rows, tokens = conditions.rows, conditions.tokens
    bias = np.zeros((rows, 1, 1, tokens), np.float32)
    if conditions.causal:
        least = np.finfo(np.float32).min
        bias = np.triu(np.full((tokens, tokens), least, np.float32), 1)[np.newaxis, np.newaxis]
    keep = None
    if conditions.dropout:
        keep = (draw.random((rows, shape.heads, tokens, tokens), np.float32) < 0.9).astype(np.uint8)
    cos = sin = None
    if shape.rotary != "none":
        angles = np.linspace(0, 1, tokens * shape.rotary_dims // 2, dtype=np.float32).reshape(1, tokens, -1)
        both = np.concatenate([angles, angles], -1) if shape.rotary == "half" else np.repeat(angles, 2, -1)
        cos, sin = np.cos(both), np.sin(both)
    return AttentionInputs(
        x=x,
        bias=bias,
        cos=cos,
        sin=sin,
        keep=keep,
        keep_scale=1 / 0.9 if conditions.dropout else 1.0,
        added=_added(shape, x, conditions.need),
    )


def _added(shape: Shape, x: Array, need: Need) -> dict[str, Array]:
    """What LoRA adds to projections, where a run has any."""
    if not need.added:
        return {}
    return {name: np.zeros((*x.shape[:2], width), np.float32) for name, width in added_widths(shape).items()}
