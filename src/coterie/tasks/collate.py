"""Rows into the arrays of a micro-batch, padded to the longest of them."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from coterie.tasks.batches import padded_length
from coterie.tasks.examples import IGNORED_LABEL, EncodedExample, IntArray, LabelArray


def collate(
    examples: Sequence[EncodedExample], *, pad_token_id: int, pad_to_multiple: int = 1
) -> dict[str, LabelArray]:
    """The arrays of one micro-batch, padded on the right; all int64, only real-valued labels float32.

    Padding is told by position, so a pad token that is also the end of text stays visible where it is meant.

    Args:
        examples: B rows; none gives arrays with B = T = 0.
        pad_token_id: Fills `input_ids`.
        pad_to_multiple: T is rounded up to a multiple of it.

    Returns:
        `input_ids`, `attention_mask` (of packed rows `position_ids` instead) and, if the tokenizer makes them,
        `token_type_ids`, each (B, T); `labels` (B, T), or (B,) where a row has one label.
    """
    count = len(examples)
    # A row without any token (a tokenizer without special tokens, an empty sentence) still needs a column.
    width = padded_length(max((max(row.tokens, 1) for row in examples), default=0), pad_to_multiple)

    def padded(rows: Sequence[IntArray], fill: int) -> IntArray:
        array = np.full((count, width), fill, dtype=np.int64)
        for index, row in enumerate(rows):
            array[index, : len(row)] = row
        return array

    arrays: dict[str, LabelArray] = {"input_ids": padded([row.input_ids for row in examples], pad_token_id)}
    if any(row.position_ids is not None for row in examples):
        # Transformers tells packed rows apart by their positions, if there is no mask. Padding is one more row.
        arrays["position_ids"] = np.stack([_positions(row, width) for row in examples])
    else:
        arrays["attention_mask"] = padded([np.ones(row.tokens, dtype=np.int64) for row in examples], 0)
    types = [row.token_type_ids for row in examples if row.token_type_ids is not None]
    if types:
        arrays["token_type_ids"] = padded(types, 0)
    if examples and examples[0].labels.ndim == 0:
        arrays["labels"] = cast("LabelArray", np.stack([row.labels for row in examples]))
    else:
        arrays["labels"] = padded([row.labels.astype(np.int64, copy=False) for row in examples], IGNORED_LABEL)
    return arrays


def _positions(row: EncodedExample, width: int) -> IntArray:
    """Positions (T,) of a packed row, and from 0 again those of its padding."""
    own = np.arange(row.tokens) if row.position_ids is None else row.position_ids
    return np.concatenate([own, np.arange(width - row.tokens)])
