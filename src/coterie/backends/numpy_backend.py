"""NumPy: forward and backward written out. What the others are held to in float64, and what runs everywhere."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.backends.backend import BackendInfo, Loaded, Saved
from coterie.backends.checks import check_inputs, check_shape, check_weights
from coterie.backends.shares import (
    Activation,
    Array,
    AttentionInputs,
    AttentionShape,
    Gradients,
    Inputs,
    Need,
    NeuronInputs,
    NeuronShape,
    Outputs,
    Rotary,
    Shape,
)

Floats = npt.NDArray[Any]
"""Of the backend's own dtype."""


class _Loaded:
    """Weights of a share, in the backend's dtype; in float32 they are the caller's own arrays."""

    def __init__(self, shape: Shape, weights: dict[str, Floats]) -> None:
        self.shape = shape
        self.weights = weights

    def release(self) -> None:
        """Nothing is held but references."""


class _Saved:
    """Intermediate results by name."""

    def __init__(self, loaded: _Loaded, inputs: Inputs) -> None:
        self.loaded = loaded
        self.inputs = inputs
        self.kept: dict[str, Floats] = {}

    def release(self) -> None:
        self.kept = {}


class NumpyBackend:
    """Computes in `dtype`; the protocol's float32 unless it serves as an oracle."""

    def __init__(self, dtype: npt.DTypeLike = np.float32) -> None:
        self._dtype = np.dtype(dtype)

    @property
    def info(self) -> BackendInfo:
        """The processor."""
        return BackendInfo(
            name="numpy",
            device="processor",
            kind="cpu",
            driver=f"NumPy {np.__version__}",
            threads=_threads_of_products(),
        )

    def load(self, shape: Shape, weights: Mapping[str, Array]) -> _Loaded:
        """See `Backend.load`."""
        check_shape(shape)
        check_weights(shape, weights)
        return _Loaded(shape, {name: np.asarray(array, self._dtype) for name, array in weights.items()})

    def forward(
        self, loaded: Loaded, inputs: Inputs, *, inner: bool = False, keep: bool = True
    ) -> tuple[Outputs, _Saved]:
        """See `Backend.forward`."""
        assert isinstance(loaded, _Loaded)
        check_inputs(loaded.shape, inputs)
        saved = _Saved(loaded, inputs)
        if isinstance(inputs, AttentionInputs):
            y, into = self._attention(loaded, inputs, saved)
        else:
            y, into = self._neurons(loaded, inputs, saved)
        if not keep:
            saved.release()
        return Outputs(y=y, inner=into if inner else None), saved

    def backward(self, saved: Saved, gradient: Array, need: Need, *, inner_gradient: Array | None = None) -> Gradients:
        """See `Backend.backward`."""
        assert isinstance(saved, _Saved)
        down = np.asarray(gradient, self._dtype)
        weights = saved.loaded.weights
        second = "wo" if isinstance(saved.inputs, AttentionInputs) else "w2"
        into = down @ weights[second]
        if inner_gradient is not None:
            into += inner_gradient
        grads: dict[str, Floats] = {}
        if need.weights:
            grads[second] = _outer(down, saved.kept["inner"])
        if isinstance(saved.inputs, AttentionInputs):
            firsts = self._attention_backward(saved, into)
            names = {"q": ("wq", "bq"), "k": ("wk", "bk"), "v": ("wv", "bv")}
        else:
            firsts = self._neurons_backward(saved, into)
            names = {"up": ("w1", "b1"), "gate": ("wg", "bg")}
        x = np.asarray(saved.inputs.x, self._dtype)
        if need.weights:
            for first, one in firsts.items():
                weight, bias = names[first]
                grads[weight] = _outer(one, x)
                if bias in weights:
                    grads[bias] = one.sum((0, 1))
        parts = [one @ weights[names[first][0]] for first, one in firsts.items()] if need.x else []
        below = functools.reduce(np.add, parts) if parts else None
        added = {name: firsts[name] for name in saved.inputs.added} if need.added else {}
        saved.release()
        return Gradients(x=below, weights=grads, added=added)

    def trim(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""

    def _first(self, loaded: _Loaded, inputs: Inputs, names: tuple[str, str, str]) -> Floats:
        """One projection [B,T,n] with its bias and what is added to it."""
        weight, bias, added = names
        result: Floats = np.asarray(inputs.x, self._dtype) @ loaded.weights[weight].T
        if bias in loaded.weights:
            result += loaded.weights[bias]
        if added in inputs.added:
            result += inputs.added[added]
        return result

    def _attention(self, loaded: _Loaded, inputs: AttentionInputs, saved: _Saved) -> tuple[Floats, Floats]:
        shape = loaded.shape
        assert isinstance(shape, AttentionShape)
        q = _grouped(self._first(loaded, inputs, ("wq", "bq", "q")), shape, shape.heads // shape.groups)
        k = _grouped(self._first(loaded, inputs, ("wk", "bk", "k")), shape, 1)
        v = _grouped(self._first(loaded, inputs, ("wv", "bv", "v")), shape, 1)
        if shape.rotary != "none":
            q, k = (turn(one, *_tables(inputs), shape.rotary) for one in (q, k))
        scores = q @ k.swapaxes(-1, -2) * shape.scale
        if inputs.bias is not None:
            scores += _spread(inputs.bias, shape)
        scores -= scores.max(-1, keepdims=True)
        probabilities = np.exp(scores, out=scores)
        probabilities /= probabilities.sum(-1, keepdims=True)
        dropped = probabilities if inputs.keep is None else probabilities * _kept(inputs, shape, self._dtype)
        into = _side_by_side(dropped @ v)
        saved.kept = {"q": q, "k": k, "v": v, "p": probabilities, "dropped": dropped, "inner": into}
        return into @ loaded.weights["wo"].T, into

    def _attention_backward(self, saved: _Saved, into: Floats) -> dict[str, Floats]:
        """Gradients of the three projections, each [B,T,n]."""
        shape, inputs, kept = saved.loaded.shape, saved.inputs, saved.kept
        assert isinstance(shape, AttentionShape)
        assert isinstance(inputs, AttentionInputs)
        heads = _grouped(into, shape, shape.heads // shape.groups)
        dv = (kept["dropped"].swapaxes(-1, -2) @ heads).sum(2, keepdims=True)
        dp = heads @ kept["v"].swapaxes(-1, -2)
        if inputs.keep is not None:
            dp = dp * _kept(inputs, shape, self._dtype)
        p = kept["p"]
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * shape.scale
        dq = ds @ kept["k"]
        dk = (ds.swapaxes(-1, -2) @ kept["q"]).sum(2, keepdims=True)
        if shape.rotary != "none":
            cos, sin = _tables(inputs)
            dq, dk = (turn(one, cos, -sin, shape.rotary) for one in (dq, dk))
        return {"q": _side_by_side(dq), "k": _side_by_side(dk), "v": _side_by_side(dv)}

    def _neurons(self, loaded: _Loaded, inputs: NeuronInputs, saved: _Saved) -> tuple[Floats, Floats]:
        shape = loaded.shape
        assert isinstance(shape, NeuronShape)
        up = self._first(loaded, inputs, ("w1", "b1", "up"))
        kept = {"up": up}
        if shape.gated:
            kept["gate"] = self._first(loaded, inputs, ("wg", "bg", "gate"))
            into = activate(kept["gate"], shape.activation)[0] * up
        else:
            into = activate(up, shape.activation)[0]
        saved.kept = {**kept, "inner": into}
        return into @ loaded.weights["w2"].T, into

    def _neurons_backward(self, saved: _Saved, into: Floats) -> dict[str, Floats]:
        shape, kept = saved.loaded.shape, saved.kept
        assert isinstance(shape, NeuronShape)
        if not shape.gated:
            return {"up": into * activate(kept["up"], shape.activation)[1]}
        value, slope = activate(kept["gate"], shape.activation)
        return {"up": into * value, "gate": into * kept["up"] * slope}


def _grouped(x: Floats, shape: AttentionShape, each: int) -> Floats:
    """[B,T,n] as [B,G,each,T,d]."""
    rows, tokens = x.shape[:2]
    return x.reshape(rows, tokens, shape.groups, each, shape.head_dim).transpose(0, 2, 3, 1, 4)


def _side_by_side(x: Floats) -> Floats:
    """[B,G,Q,T,d] as [B,T,G Q d]."""
    rows, _, _, tokens, _ = x.shape
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2, 4)).reshape(rows, tokens, -1)


def _spread(bias: Array, shape: AttentionShape) -> Array:
    """[B or 1, H or 1, T or 1, T] with heads as (groups, heads of a group)."""
    rows, heads, queries, keys = bias.shape
    groups = (shape.groups, shape.heads // shape.groups) if heads == shape.heads else (1, 1)
    return bias.reshape(rows, *groups, queries, keys)


def _kept(inputs: AttentionInputs, shape: AttentionShape, dtype: npt.DTypeLike) -> Floats:
    """What probabilities are multiplied by under dropout."""
    assert inputs.keep is not None
    rows, _, queries, keys = inputs.keep.shape
    mask = inputs.keep.reshape(rows, shape.groups, shape.heads // shape.groups, queries, keys)
    return mask.astype(dtype) * inputs.keep_scale


def _tables(inputs: AttentionInputs) -> tuple[Floats, Floats]:
    """Cosines and sines [B or 1, 1, 1, T, R]."""
    assert inputs.cos is not None
    assert inputs.sin is not None
    return inputs.cos[:, None, None], inputs.sin[:, None, None]


def turn(x: Floats, cos: Floats, sin: Floats, rotary: Rotary) -> Floats:
    """Turns the first R numbers of the last axis, in pairs; with `-sin` back again."""
    dims = cos.shape[-1]
    front = x[..., :dims]
    other = np.empty_like(front)
    if rotary == "half":
        other[..., : dims // 2], other[..., dims // 2 :] = -front[..., dims // 2 :], front[..., : dims // 2]
    else:
        other[..., ::2], other[..., 1::2] = -front[..., 1::2], front[..., ::2]
    turned: Floats = front * cos + other * sin
    return turned if dims == x.shape[-1] else np.concatenate([turned, x[..., dims:]], -1)


def activate(x: Floats, activation: Activation) -> tuple[Floats, Floats]:
    """The function's values, and its slopes."""
    if activation == "relu":
        return np.maximum(x, 0), (x > 0).astype(x.dtype)
    # Every worker loads this module, and SciPy's functions take 0.7 s and 12 MiB that few of them need.
    from scipy.special import erf, expit  # noqa: PLC0415 - see above

    if activation == "silu":
        gate = expit(x)
        return x * gate, gate * (1 + x * (1 - gate))
    if activation == "gelu":
        below = 0.5 * (1 + erf(x * 2**-0.5))
        return x * below, below + x * np.exp(-0.5 * x * x) * (2 * np.pi) ** -0.5
    factor = (2 / np.pi) ** 0.5
    bent = np.tanh(factor * (x + 0.044715 * x * x * x))
    slope = 0.5 * (1 + bent) + 0.5 * x * (1 - bent * bent) * factor * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + bent), slope


def _outer(down: Floats, up: Floats) -> Floats:
    """The gradient [m, n] of a product's weights, from [B,T,m] above and [B,T,n] below."""
    return down.reshape(-1, down.shape[-1]).T @ up.reshape(-1, up.shape[-1])


def _threads_of_products() -> int:
    """Threads of NumPy's matrix products: its library reads these settings when loaded, else takes all cores."""
    for setting in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        if (value := os.environ.get(setting, "")).isdecimal() and int(value) > 0:
            return int(value)
    return os.cpu_count() or 1


def probe(threads: int) -> tuple[NumpyBackend, ...]:
    """Always there; `threads` is no matter of this process once NumPy is loaded."""
    del threads
    return (NumpyBackend(),)
