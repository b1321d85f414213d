"""One additive bias for a block's scores, whatever its family calls a mask."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.backends.shares import Array

_LEAST = torch.finfo(torch.float32).min
_KEPT = 4


class Scores(NamedTuple):
    """What is added to the scores.

    Attributes:
        bias: [B or 1, H or 1, T or 1, T], or None for nothing.
        sees_nothing: Whether some token may see none at all, which families treat in different ways.
    """

    bias: Array | None
    sees_nothing: bool = False


class _Made(NamedTuple):
    refs: tuple["weakref.ref[Tensor] | None", ...]
    facts: tuple[int, ...]
    scores: Scores


class ScoreBias:
    """Makes biases; all blocks of a stage that get the same mask share one."""

    def __init__(self) -> None:
        self._made: list[_Made] = []

    def of(self, mask: Tensor | None, alibi: Tensor | None, sizes: tuple[int, int], *, causal: bool) -> Scores | None:
        """The bias, or None for a mask of a kind that is not known here.

        Args:
            mask: Of bools, True for what is seen, or added to the scores: [B or 1, H or 1, T or 1, T].
            alibi: Added too: [B H, 1, T].
            sizes: B and T.
            causal: Without a mask, tokens see only those before them.
        """
        given = (mask, alibi)
        if any(one is not None and one.is_inference() for one in given):
            return _scores(mask, alibi, sizes, causal=causal)  # such tensors do not tell whether they have changed
        facts = (*sizes, int(causal), *(0 if one is None else one._version for one in given))  # noqa: SLF001 - torch's own counter
        for made in self._made:
            if made.facts == facts and all(_is(ref, one) for ref, one in zip(made.refs, given, strict=True)):
                return made.scores
        scores = _scores(mask, alibi, sizes, causal=causal)
        if scores is not None:
            refs = tuple(None if one is None else weakref.ref(one) for one in given)
            self._made = [*self._made[1 - _KEPT :], _Made(refs, facts, scores)]
        return scores


def _is(ref: "weakref.ref[Tensor] | None", one: Tensor | None) -> bool:
    """Whether a tensor that lives is referred to, or none was and none is given."""
    return ref is None if one is None else ref is not None and ref() is one


def _scores(mask: Tensor | None, alibi: Tensor | None, sizes: tuple[int, int], *, causal: bool) -> Scores | None:
    rows, tokens = sizes
    total: Tensor | None = None
    sees_nothing = False
    if mask is not None:
        if mask.ndim != 4 or mask.shape[-1] != tokens or mask.shape[-2] not in {1, tokens}:
            return None
        if mask.shape[2] > 1 and mask.stride(2) == 0:
            mask = mask[:, :, :1]  # one row for all tokens, spread without memory
        if mask.dtype == torch.bool:
            sees_nothing = not bool(mask.any(-1).all())
            total = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, _LEAST)
        elif mask.dtype == torch.float32:
            total = mask.detach().clamp(min=_LEAST)
        else:
            return None
    elif causal and tokens > 1:
        total = torch.full((tokens, tokens), _LEAST).triu_(1)[None, None]
    if alibi is not None:
        if alibi.ndim != 3 or alibi.shape[0] % rows or alibi.shape[1:] != (1, tokens):
            return None
        spread = alibi.detach().float().view(rows, -1, 1, tokens)
        total = spread if total is None else (spread + total).clamp(min=_LEAST)
    if total is None:
        return Scores(None)
    return Scores(total.to("cpu").contiguous().numpy(), sees_nothing)
