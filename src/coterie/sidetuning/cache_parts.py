"""Parts of batches that wait for the rest: every stage of a cut backbone sends its own layers."""

from typing import TypeAlias

import torch

from coterie.errors import ActivationCacheError, ProtocolError
from coterie.sidetuning.activations import ActivationBatch, join_layers
from coterie.sidetuning.cache_checks import same_content
from coterie.sidetuning.cache_layout import CacheLayout

StepKey: TypeAlias = tuple[int, ...]
"""Under which a batch is sent, such as (step, micro-batch): all its parts have the same."""


class PendingParts:
    """Unfinished batches in memory."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._parts: dict[StepKey, list[ActivationBatch]] = {}

    def __contains__(self, step_key: StepKey) -> bool:
        return step_key in self._parts

    @property
    def tokens(self) -> int:
        """Tokens of all unfinished batches."""
        return sum(parts[0].tokens for parts in self._parts.values())

    def add(self, part: ActivationBatch, step_key: StepKey) -> ActivationBatch | None:
        """Keep a part; returns the whole batch if this was the last.

        Raises:
            ActivationCacheError: It came before, with other content.
            ProtocolError: It is of other rows than the batch's other parts, or overlaps one of them.
        """
        parts = self._parts.setdefault(step_key, [])
        for known in parts:
            if not torch.equal(known.samples, part.samples) or not torch.equal(known.counts, part.counts):
                raise ProtocolError(f"parts of step {step_key} are of different rows")
            if known.layers == part.layers:
                if not same_content(known, part):
                    raise ActivationCacheError(
                        f"layers {known.layers} of step {step_key} came twice, with different content",
                        hint="a backbone must give the same activations each time: it has to be in evaluation mode, "
                        "with the same rows in a batch",
                    )
                return None
            if set(known.layers) & set(part.layers):
                raise ProtocolError(f"layers {known.layers} and {part.layers} of step {step_key} overlap")
        parts.append(part)
        if self._lacking(parts) or all(known.labels is None for known in parts):
            return None
        return join_layers(parts)

    def lacking(self) -> dict[StepKey, tuple[int, ...]]:
        """Unfinished batches and the layers that each lacks; none where only labels are awaited."""
        return {step_key: self._lacking(parts) for step_key, parts in self._parts.items()}

    def drop(self, step_key: StepKey) -> None:
        """Forget one batch."""
        del self._parts[step_key]

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()

    def _lacking(self, parts: list[ActivationBatch]) -> tuple[int, ...]:
        there = {layer for part in parts for layer in part.layers}
        return tuple(layer for layer in self._layout.layers if layer not in there)
