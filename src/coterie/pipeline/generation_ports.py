"""The seam between a stage that writes text and everything outside it; loads no transformers."""

from typing import Protocol

import msgspec
import torch
from torch import Tensor

_ROWS = 1 << 63
"""Rows have numbers below this: drawing packs them into 64 bits."""


class GenerationItem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is asked of every stage at one place in the order.

    Attributes:
        group: Which group of rows.
        position: Tokens that the group's rows have been continued by.
        rows: The number of each of its rows in the data, B of them, where the group begins; else empty.
        ids: Prompts [B, T] padded on the left where the group begins; else the newest token of each row, [B, 1].
        mask: 1 where a token is none of the padding, [B, T], where a group begins that has padding.
        ended: Groups that are done: what is kept of them is no longer needed.
        is_last: Nothing comes after; there is no group in it.
    """

    group: int
    position: int
    rows: tuple[int, ...] = ()
    ids: Tensor | None = None
    mask: Tensor | None = None
    ended: tuple[int, ...] = ()
    is_last: bool = False

    @property
    def is_whole(self) -> bool:
        """Do the tensors belong to what the other fields say?"""
        if self.is_last:
            return self.ids is None and self.mask is None
        if self.ids is None or self.ids.dtype != torch.int64 or self.ids.ndim != 2 or not self.ids.numel():
            return False
        if self.position < 0 or not all(0 <= row < _ROWS for row in self.rows):
            return False
        if self.position:
            return self.mask is None and self.ids.shape[1] == 1
        return len(self.rows) == len(self.ids) and (self.mask is None or self.mask.shape == self.ids.shape)


class GenerationPorts(Protocol):
    """Blocking calls from the compute thread; the steps are those of `StagePorts`, one for each item."""

    def take_item(self, step: int) -> GenerationItem:
        """Wait for what comes next."""
        ...

    def take_hidden(self, step: int, micro_batch: int) -> Tensor:
        """Wait for the previous stage's output, [B, t, D]."""
        ...

    def put_hidden(self, step: int, micro_batch: int, hidden: Tensor) -> None:
        """Send this stage's output, [B, t, D], to the next stage; may wait for room in its queue."""
        ...

    def put_predictions(self, step: int, micro_batch: int, predictions: Tensor) -> None:
        """Hand out the next token of each row, int64 [B]; last stage."""
        ...
