"""Cross-entropy as a sum, in float32, over vocabularies so large that every copy of the logits counts.

PyTorch's own keeps the logits and their logarithms of probabilities, and makes two more such arrays in backward. This
one keeps the logits alone, works through them in slices, and makes one array in backward: their gradient.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.tasks.examples import IGNORED_LABEL

_SLICE_ELEMENTS = 1 << 21
"""Logits in float32 at a time: 8 MiB, so that a slice and its exponentials take less than most blocks do."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Minus the logarithm of the probability of each label, summed; 0, with zero gradients, where there is no label.

    Args:
        logits: (B, T, V) or (B, V), in any floating type.
        labels: (B, T) or (B,) int64, `IGNORED_LABEL` where there is none.

    Returns:
        A float32 scalar.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return cast("Tensor", _CrossEntropySum.apply(flat, labels.reshape(-1)))  # type: ignore[no-untyped-call] # torch's


class _CrossEntropySum(torch.autograd.Function):
    """Sum of cross-entropies over the rows of (N, V)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """See `cross_entropy_sum`; keeps the logits, the labels and the normalisers (N,)."""
        normalisers = torch.empty(len(logits), device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for rows in _slices(logits):
            scores, own = logits[rows].float(), labels[rows]
            normalisers[rows] = torch.logsumexp(scores, dim=-1)
            kept = own != IGNORED_LABEL
            chosen = scores.gather(-1, torch.where(kept, own, 0).unsqueeze(-1)).squeeze(-1)
            # Where a label is ignored even an infinite logit must not count.
            total += torch.where(kept, normalisers[rows] - chosen, 0.0).sum()
        ctx.save_for_backward(logits, labels, normalisers)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Probabilities less 1 at the label, 0 where there is none; (N, V) in the type of the logits."""
        logits, labels, normalisers = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _slices(logits):
            own = labels[rows]
            kept = own != IGNORED_LABEL
            # The first operation makes a copy: the logits stay what they are.
            slopes = (logits[rows].float() - normalisers[rows].unsqueeze(-1)).exp_()
            slopes.scatter_add_(-1, torch.where(kept, own, 0).unsqueeze(-1), -torch.ones_like(slopes[:, :1]))
            slopes.mul_(gradient).masked_fill_(~kept.unsqueeze(-1), 0.0)
            result[rows] = slopes
        return result, None


def _slices(logits: Tensor) -> list[slice]:
    count, width = logits.shape
    size = max(_SLICE_ELEMENTS // max(width, 1), 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
