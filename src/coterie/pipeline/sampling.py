"""Which token comes next: the likeliest, or one drawn by (seed, row, position), on any devices and in any batch."""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.errors import NonFiniteLossError
from coterie.jobs.generation_spec import GenerationSpec


def next_tokens(logits: Tensor, spec: GenerationSpec, *, rows: Sequence[int], position: int) -> Tensor:
    """One token for each row, int64 [B] on the CPU.

    Args:
        logits: Of the next token, [B, V].
        spec: Greedy, or how to draw.
        rows: The number of each row in its data, B of them.
        position: Tokens that have been generated before.

    Raises:
        NonFiniteLossError: A logit is not a number.
    """
    if bool(logits.isnan().any()):
        raise NonFiniteLossError(
            f"the logits of token {position + 1} are not numbers",
            hint="the model's weights are damaged: train it again",
        )
    if spec.temperature == 0:
        return logits.argmax(dim=-1).cpu()
    # float64: a sum over a vocabulary must not depend on how a device adds.
    probabilities = torch.softmax(logits.cpu().double() / spec.temperature, dim=-1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    sums = ordered.cumsum(dim=-1)
    kept = (sums - ordered < spec.top_p).sum(dim=-1).clamp(min=1)
    totals = sums.gather(1, kept[:, None] - 1)
    draws = torch.tensor([[uniform(spec.seed, row, position)] for row in rows], dtype=torch.float64)
    places = torch.searchsorted(sums, draws * totals, right=True)[:, 0].minimum(kept - 1)
    return tokens.gather(1, places[:, None])[:, 0]


def uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1) that is the same on every machine."""
    packed = struct.pack("<3q", seed, row, position)
    bits = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return (bits >> 11) / (1 << 53)
