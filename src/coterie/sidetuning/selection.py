"""Which tokens enter the loss, and so which activations are sent: the token selector (METHODS.md 2.2)."""

from typing import Literal

import msgspec
import torch
from torch import Tensor

from coterie.pipeline.micro_batch import IGNORED_LABEL

Reads = Literal["first", "last", "labelled"]
"""What a model's output layer reads: a row's first token, its last one that is no padding, or every token by itself."""


class TokenSelection(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Positions of a padded batch, ordered by row and then by position.

    Attributes:
        rows: Row of each selected token, int64 (N,).
        positions: Its position in the row, int64 (N,).
        counts: Selected tokens of each row, int64 (B,); 0 where a row has no label.
        loss_index: Which of the N enter the loss, int64 (M,), ascending; None if all do.
    """

    rows: Tensor
    positions: Tensor
    counts: Tensor
    loss_index: Tensor | None = None

    def gather(self, hidden: Tensor) -> Tensor:
        """The selected tokens of hidden states [B,T,D], or of labels [B,T]: (N, D) or (N,), copied."""
        return hidden[self.rows.to(hidden.device), self.positions.to(hidden.device)]

    def loss_logits(self, logits: Tensor) -> Tensor:
        """The logits (M, C), of (B, T, C) or (B, C), of the tokens that enter the loss."""
        index = slice(None) if self.loss_index is None else self.loss_index
        rows = self.rows[index]
        return logits[rows] if logits.ndim == 2 else logits[rows, self.positions[index]]

    def loss_labels(self, labels: Tensor) -> Tensor:
        """One label for each token that enters the loss, (M,), of labels (B, T) or (B,)."""
        index = slice(None) if self.loss_index is None else self.loss_index
        return labels[self.rows[index]] if labels.ndim == 1 else labels[self.rows[index], self.positions[index]]


def select_tokens(
    labels: Tensor | None,
    readable: Tensor,
    reads: Reads,
    *,
    selects_tokens: bool = True,
    present: Tensor | None = None,
) -> TokenSelection:
    """The tokens that are sent, by what the output layer reads and which labels there are.

    Args:
        labels: (B,), or (B, T), already shifted where a label is the token that follows; -100 (real-valued ones: NaN)
            where nothing is learnt. None in prediction: then every row, or every token that is no padding, is read.
        readable: 1 for tokens that may be read, (B, T): no padding, and for `last` nothing that equals the pad token.
        reads: What the output layer reads.
        selects_tokens: Send only what enters the loss; otherwise all tokens that are present.
        present: 1 for tokens that are no padding, (B, T); `readable` itself if it is not given.
    """
    present = readable if present is None else present
    read = _read(labels, readable, reads)
    chosen = read if selects_tokens else read | present.bool()
    rows, positions = chosen.nonzero(as_tuple=True)
    return TokenSelection(
        rows=rows,
        positions=positions,
        counts=chosen.sum(1),
        loss_index=None if selects_tokens else read[rows, positions].nonzero().squeeze(1),
    )


def is_labelled(labels: Tensor) -> Tensor:
    """True where a label is one, of the shape of `labels`."""
    return labels.isfinite() if labels.is_floating_point() else labels.ne(IGNORED_LABEL)


def _read(labels: Tensor | None, readable: Tensor, reads: Reads) -> Tensor:
    """True for the tokens that enter the loss, (B, T)."""
    if reads == "labelled":
        return readable.bool() if labels is None else is_labelled(labels)
    read = torch.zeros_like(readable, dtype=torch.bool)
    if readable.shape[1] == 0:
        return read
    numbers = torch.arange(readable.shape[1], device=readable.device)
    position = torch.zeros_like(readable[:, 0]) if reads == "first" else (numbers * readable.bool()).argmax(1)
    rows = torch.arange(len(readable), device=readable.device)
    read[rows, position] = True if labels is None else is_labelled(labels)
    return read
