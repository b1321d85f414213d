"""The attention of a block in shares: what stands in the place of its module's forward."""

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.backends.shares import Array, AttentionInputs, Mask
from coterie.heads.effective import WeightVersion
from coterie.heads.layout import AttentionLayout
from coterie.heads.replaced import Replaced, can_be_shared
from coterie.heads.score_bias import ScoreBias
from coterie.heads.split_function import SplitCall, SplitLayer

_UNUSED = (
    "cache",
    "past_key_values",
    "past_key_value",
    "layer_past",
    "encoder_hidden_states",
    "output_attentions",
    "head_mask",
    "position_bias",
)
"""Arguments with which the block does more than shares compute; it then runs as it is."""


class _Given(NamedTuple):
    """What one forward is given, apart from hidden states."""

    bias: Array | None
    cos: Array | None
    sin: Array | None


class SplitAttention:
    """Computes a block's attention in shares, or by its own code where the arguments ask for more.

    Args:
        layout: Where it is.
        layer: Who computes what.
        bias: Makes masks into biases, for all blocks of a stage.
    """

    def __init__(self, layout: AttentionLayout, layer: SplitLayer, bias: ScoreBias) -> None:
        self._layout = layout
        self._layer = layer
        self._bias = bias
        self._signature = inspect.signature(layout.core.forward)
        self._core = Replaced(layout.core, self._attend)
        self._second = Replaced(layout.second.module, self._project)
        self._pending: tuple[Tensor, Tensor | None] | None = None

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """What is to be put in place."""
        return (self._core, self._second)

    def _attend(self, *args: object, **kwargs: object) -> object:
        arguments = self._arguments(args, kwargs)
        hidden = arguments.get("hidden_states")
        given = self._given(arguments)
        if given is None or not isinstance(hidden, Tensor):
            return self._core.own(*args, **kwargs)
        y, inner = self._layer(self._call(hidden, given))
        if self._layout.form.tail == "inner":
            # Another module projects: it gets the sum of the projected parts, and its replaced forward knows that.
            self._pending = (y, inner)
            return y, None
        return self._finished(self._completed(y, inner), arguments), None

    def _project(self, *args: object, **kwargs: object) -> object:
        """In the place of the output projection's forward."""
        pending, self._pending = self._pending, None
        if pending is None or not args or args[0] is not pending[0]:
            return self._second.own(*args, **kwargs)
        return self._completed(*pending)

    def _completed(self, y: Tensor, inner: Tensor | None) -> Tensor:
        """The summed parts with what the output projection has beside its weight."""
        second = self._layout.second
        bias = second.bias()
        if bias is not None:
            y = y + bias
        added = None if inner is None else second.added(inner)
        return y if added is None else y + added

    def _finished(self, y: Tensor, arguments: Mapping[str, object]) -> Tensor:
        """As the module's own forward ends."""
        core, tail = self._layout.core, self._layout.form.tail
        if tail == "projected":
            return y
        if tail == "residual":
            residual, share = arguments["residual"], core.hidden_dropout
            assert isinstance(residual, Tensor)
            assert isinstance(share, float)
            return residual + functional.dropout(y, p=share, training=core.training)
        dropped: Tensor = core.get_submodule(tail)(y)
        return dropped

    def _arguments(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        bound = self._signature.bind(*args, **kwargs).arguments
        return {**bound.pop("kwargs", {}), **bound}

    def _given(self, arguments: Mapping[str, object]) -> _Given | None:
        """What the backends need; None if the arguments ask for something else."""
        hidden, mask, alibi = (arguments.get(name) for name in ("hidden_states", "attention_mask", "alibi"))
        if not can_be_shared(hidden) or any(_is_used(arguments.get(name)) for name in _UNUSED):
            return None
        assert isinstance(hidden, Tensor)
        if any(one is not None and not isinstance(one, Tensor) for one in (mask, alibi)) or self._dropout >= 1:
            return None
        scores = self._bias.of(
            mask if isinstance(mask, Tensor) else None,
            alibi if isinstance(alibi, Tensor) else None,
            (hidden.shape[0], hidden.shape[1]),
            causal=self._is_causal(arguments),
        )
        if scores is None or scores.sees_nothing:
            return None
        if self._layout.shape.rotary == "none":
            return _Given(scores.bias, None, None)
        tables = _tables(arguments.get("position_embeddings"), self._layout.shape.rotary_dims)
        return None if tables is None else _Given(scores.bias, *tables)

    def _is_causal(self, arguments: Mapping[str, object]) -> bool:
        """Whether tokens see only those before them although no mask says so: in `sdpa` only."""
        core = self._layout.core
        config = getattr(core, "config", None)
        if getattr(config, "_attn_implementation", "eager") != "sdpa":
            return False
        told = arguments.get("is_causal")
        return bool(getattr(core, "is_causal", True) if told is None else told)

    @property
    def _dropout(self) -> float:
        """The share of probabilities that this forward drops."""
        core = self._layout.core
        share = getattr(core, self._layout.form.dropout)
        if not core.training:
            return 0.0
        return float(share.p if isinstance(share, nn.Dropout) else share)

    def _call(self, hidden: Tensor, given: _Given) -> SplitCall:
        layout, shape = self._layout, self._layout.shape
        weights = dict(zip(("wq", "wk", "wv"), layout.firsts.weights(), strict=True))
        if shape.biased:
            weights |= zip(("bq", "bk", "bv"), layout.firsts.biases(), strict=True)
        weights["wo"] = layout.second.weight()
        # Drawn in the block's own order: dropout of the adapters, then of the probabilities.
        added = dict(zip(("q", "k", "v"), layout.firsts.added(hidden), strict=True))
        share = self._dropout
        keep = _kept(hidden, shape.heads, share) if share else None

        def make_inputs(x: Array, added: dict[str, Array]) -> AttentionInputs:
            return AttentionInputs(
                x=x, bias=given.bias, cos=given.cos, sin=given.sin, keep=keep, keep_scale=1 / (1 - share), added=added
            )

        return SplitCall(
            x=hidden,
            weights=weights,
            version=WeightVersion([*layout.firsts.sources(), *layout.second.sources()]),
            added={name: one for name, one in added.items() if one is not None},
            make_inputs=make_inputs,
            inner=layout.second.is_adapted,
        )


def _is_used(value: object) -> bool:
    return value is not None and value is not False


def _kept(hidden: Tensor, heads: int, share: float) -> Mask:
    """What dropout keeps of the probabilities [B,H,T,T], drawn as torch's attention on the processor draws it.

    Fused attention of an accelerator draws within its kernel; there a split block drops others, of the same share.
    Drawn as bytes: the same numbers of the generator, and no passes over floats, which no backend could share.
    """
    rows, tokens, _ = hidden.shape
    drawn = torch.empty(rows, heads, tokens, tokens, dtype=torch.uint8, device=hidden.device).bernoulli_(1 - share)
    kept: Mask = drawn.to("cpu").numpy()
    return kept


def _tables(given: object, dims: int) -> tuple[Array, Array] | None:
    """Cosines and sines of the positions, [B or 1, T, R] each; None if they are not as they should be."""
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    arrays: list[Array] = []
    for one in given:
        if not isinstance(one, Tensor) or one.ndim != 3 or one.shape[-1] != dims:
            return None
        arrays.append(np.ascontiguousarray(one.detach().float().to("cpu").numpy()))
    return arrays[0], arrays[1]
