"""What a backend is asked to compute: a share of one layer's attention heads, or of its feed-forward neurons.

Both are parts of a sum. With x [B,T,D] going in, every share gives a part of the layer's output [B,T,E], and the parts
of all shares add up to it; output bias, residual and norm stay outside. Attention is shared by whole KV groups: G of
them with Q query heads each make H = G Q heads of d numbers, so that no key or value is computed twice.
"""

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]

Rotary = Literal["none", "half", "interleaved"]
"""How positions turn a head's first `rotary_dims` numbers: pairs (i, i + R/2) as Llama, or (2i, 2i + 1) as GPT-J."""

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]

ATTENTION_WEIGHTS = ("wq", "wk", "wv", "bq", "bk", "bv", "wo")
NEURON_WEIGHTS = ("w1", "b1", "wg", "bg", "w2")


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """Some KV groups of an attention layer.

    Its weights, by name, all float32 and contiguous: `wq` [H d, D], `wk` and `wv` [G d, D], `wo` [E, H d]; if `biased`
    also `bq` [H d], `bk` and `bv` [G d]. Query head h reads the keys and values of group h // (H / G).

    Attributes:
        hidden: D, width of what goes in.
        output: E, width of what comes out.
        head_dim: d, numbers of a head.
        heads: H, query heads of the share.
        groups: G, key and value heads of the share.
        scale: What scores are multiplied by before the softmax.
        biased: Whether the projections of queries, keys and values have biases.
        rotary: How positions turn queries and keys.
        rotary_dims: R, how many numbers of a head are turned.
    """

    hidden: int
    output: int
    head_dim: int
    heads: int
    groups: int
    scale: float
    biased: bool = True
    rotary: Rotary = "none"
    rotary_dims: int = 0


class NeuronShape(msgspec.Struct, frozen=True, kw_only=True):
    """Some neurons of a feed-forward layer: `act(x w1' + b1) w2'`, or gated `(act(x wg' + bg) * (x w1' + b1)) w2'`.

    Its weights: `w1` [n, D], `w2` [E, n]; if `gated` also `wg` [n, D]; if `biased` also `b1` [n], and `bg` [n] if both.

    Attributes:
        hidden: D, width of what goes in.
        output: E, width of what comes out.
        neurons: n, neurons of the share.
        activation: The function between the two products.
        gated: Whether a second projection is multiplied in.
        biased: Whether the first projections have biases.
    """

    hidden: int
    output: int
    neurons: int
    activation: Activation = "gelu"
    gated: bool = False
    biased: bool = True


Shape = AttentionShape | NeuronShape


class AttentionInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One micro-batch of an attention share.

    Attributes:
        x: [B,T,D].
        bias: Added to the scores before the softmax: [B or 1, H or 1, T or 1, T]; a key that must not be seen has the
            least finite float32 (or less than -1e4). It holds what is masked, causality included, and ALiBi.
        cos: [B or 1, T, R] of the positions, for `rotary`; a pair's two numbers have equal entries, in the pair's
            own layout (`half`: R/2 frequencies twice over; `interleaved`: each frequency twice in a row).
        sin: The same.
        keep: Dropout of the probabilities: [B,H,T,T] of 0 and 1, what is kept.
        keep_scale: What kept probabilities are multiplied by.
        added: What is added to the projections before positions turn them (LoRA): `q` [B,T,H d], `k` and `v`
            [B,T,G d]; any of them may be absent.
    """

    x: Array
    bias: Array | None = None
    cos: Array | None = None
    sin: Array | None = None
    keep: Mask | None = None
    keep_scale: float = 1.0
    added: dict[str, Array] = {}


class NeuronInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One micro-batch of a feed-forward share.

    Attributes:
        x: [B,T,D].
        added: What is added to the first projections (LoRA): `up` and `gate` [B,T,n]; either may be absent.
    """

    x: Array
    added: dict[str, Array] = {}


Inputs = AttentionInputs | NeuronInputs


class Outputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a share gives.

    Attributes:
        y: [B,T,E], its part of the sum.
        inner: If asked for: what goes into the second product, [B,T,H d] (heads side by side) or [B,T,n]. LoRA on the
            output projection reads it.
    """

    y: Array
    inner: Array | None = None


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Which gradients a backward must give; a frozen layer needs only `x`.

    Attributes:
        x: That of what goes in.
        weights: Those of all weights of the share.
        added: Those of `Inputs.added`.
    """

    x: bool = True
    weights: bool = True
    added: bool = False


class Gradients(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was asked for, in float32.

    Attributes:
        x: [B,T,D], the share's part of the sum.
        weights: By the weights' names and in their shapes.
        added: By the names of `Inputs.added` and in their shapes.
    """

    x: Array | None = None
    weights: dict[str, Array] = {}
    added: dict[str, Array] = {}
