"""Activations of some rows, as the server trains on them: from one stage or all, of one micro-batch or many."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from coterie.errors import ProtocolError


class ActivationBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the taps gave for B rows: row after row, each row's selected tokens in the order of their positions.

    Attributes:
        samples: Id of each row, int64 (B,).
        counts: Tokens of each row, int64 (B,), N in total.
        layers: Which layers were tapped, ascending; layer l is the output of block l - 1.
        taps: float32 (N, L', D).
        labels: What the loss tokens are compared with: (M,), or in additive mode differences (M,) or (M, C). None
            where labels are not known: on devices.
        loss_index: Which of the N tokens enter the loss, int64 (M,), ascending; None if all do.

    Raises:
        ProtocolError: The parts do not belong together. (They usually come from peers.)
    """

    samples: Tensor
    counts: Tensor
    layers: tuple[int, ...]
    taps: Tensor
    labels: Tensor | None = None
    loss_index: Tensor | None = None

    def __post_init__(self) -> None:
        problem = _contradiction(self)
        if problem:
            raise ProtocolError(f"activations of {self.samples.numel()} rows contradict themselves: {problem}")

    @property
    def rows(self) -> int:
        """How many rows there are, B; some may have no token."""
        return len(self.samples)

    @property
    def tokens(self) -> int:
        """How many tokens there are, N."""
        return len(self.taps)

    @property
    def loss_tokens(self) -> int:
        """How many tokens enter the loss, M."""
        return self.tokens if self.loss_index is None else len(self.loss_index)

    @property
    def loss_counts(self) -> Tensor:
        """Tokens of each row that enter the loss, int64 (B,)."""
        if self.loss_index is None:
            return self.counts
        return torch.searchsorted(self.loss_index, self.counts.cumsum(0)).diff(prepend=self.counts.new_zeros(1))

    @property
    def loss_taps(self) -> Tensor:
        """Activations of the tokens that enter the loss, (M, L', D)."""
        return self.taps if self.loss_index is None else self.taps[self.loss_index]

    def pick(self, rows: Sequence[int] | Tensor) -> "ActivationBatch":
        """Some rows, by their index here, in the given order."""
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        tokens = _segments(self.counts, chosen)
        terms = _segments(self.loss_counts, chosen)
        loss_index = None
        if self.loss_index is not None:
            # A loss token moves with its row: less the row's old start, plus its new one.
            shift = _starts(self.counts[chosen]) - _starts(self.counts)[chosen]
            loss_index = self.loss_index[terms] + shift.repeat_interleave(self.loss_counts[chosen])
        return ActivationBatch(
            samples=self.samples[chosen],
            counts=self.counts[chosen],
            layers=self.layers,
            taps=self.taps[tokens],
            labels=None if self.labels is None else self.labels[terms],
            loss_index=loss_index,
        )

    def split(self) -> tuple["ActivationBatch", ...]:
        """One batch for each row."""
        return tuple(self.pick([row]) for row in range(self.rows))


def join_rows(parts: Sequence[ActivationBatch]) -> ActivationBatch:
    """The rows of several batches of the same layers, one after the other.

    Raises:
        ProtocolError: Their layers or widths differ, or only some have labels.
    """
    first = parts[0]
    for part in parts:
        if part.layers != first.layers or part.taps.shape[1:] != first.taps.shape[1:]:
            raise ProtocolError(f"activations of layers {first.layers} and {part.layers} are of different models")
        if (part.labels is None) != (first.labels is None) or (part.loss_index is None) != (first.loss_index is None):
            raise ProtocolError("only some of the activations to be joined have labels, or all tokens")
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.tokens)
    labels = [part.labels for part in parts if part.labels is not None]
    moved = [part.loss_index + start for part, start in zip(parts, starts, strict=False) if part.loss_index is not None]
    return ActivationBatch(
        samples=torch.cat([part.samples for part in parts]),
        counts=torch.cat([part.counts for part in parts]),
        layers=first.layers,
        taps=torch.cat([part.taps for part in parts]),
        labels=torch.cat(labels) if labels else None,
        loss_index=torch.cat(moved) if moved else None,
    )


def join_layers(parts: Sequence[ActivationBatch]) -> ActivationBatch:
    """The same rows as several stages tapped them, each its own layers; labels from whichever part has them.

    Raises:
        ProtocolError: The parts are of different rows, or a layer comes twice.
    """
    first = parts[0]
    ordered = sorted((part for part in parts if part.layers), key=lambda part: part.layers)
    for part in parts:
        if not torch.equal(part.samples, first.samples) or not torch.equal(part.counts, first.counts):
            raise ProtocolError("stages sent activations of different rows for one micro-batch")
    labelled = next((part for part in parts if part.labels is not None), first)
    return ActivationBatch(
        samples=first.samples,
        counts=first.counts,
        layers=tuple(layer for part in ordered for layer in part.layers),
        taps=torch.cat([part.taps for part in ordered], dim=1) if ordered else first.taps,
        labels=labelled.labels,
        loss_index=labelled.loss_index,
    )


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


def _segments(counts: Tensor, chosen: Tensor) -> Tensor:
    """Indices of the elements of chosen rows, row after row."""
    sizes = counts[chosen]
    within = torch.arange(int(sizes.sum())) - _starts(sizes).repeat_interleave(sizes)
    return _starts(counts)[chosen].repeat_interleave(sizes) + within


def _contradiction(batch: ActivationBatch) -> str:
    """What does not fit together, or an empty string."""
    if batch.samples.ndim != 1 or batch.counts.shape != batch.samples.shape:
        return f"ids of shape {tuple(batch.samples.shape)}, counts of shape {tuple(batch.counts.shape)}"
    total = int(batch.counts.sum())
    wanted = (total, len(batch.layers))
    if bool((batch.counts < 0).any()) or batch.taps.ndim != 3 or batch.taps.shape[:2] != wanted:
        return f"{total} tokens of {len(batch.layers)} layers, and a tensor of shape {tuple(batch.taps.shape)}"
    if any(low >= high for low, high in pairwise(batch.layers)):
        return f"layers {batch.layers} do not ascend"
    return _contradiction_of_loss(batch)


def _contradiction_of_loss(batch: ActivationBatch) -> str:
    index = batch.loss_index
    if index is not None and index.ndim != 1:
        return f"an index of loss tokens of shape {tuple(index.shape)}"
    if index is not None and len(index):
        in_range = int(index[0]) >= 0 and int(index[-1]) < batch.tokens
        if not in_range or bool((index.diff() <= 0).any()):
            return f"the tokens that enter the loss are not among the {batch.tokens}"
    if batch.labels is not None and len(batch.labels) != batch.loss_tokens:
        return f"{len(batch.labels)} labels for {batch.loss_tokens} loss tokens"
    return ""
