"""What a data set's rows are: as people write them, and as a model takes them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
"""Token ids and positions on this side of the wire."""

LabelArray = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Labels: class or token ids, or real numbers where the task is a regression."""

PredictedArray = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Predictions as they come from the last stage: ids, or real numbers where the task is a regression."""

IGNORED_LABEL = -100
"""A position with this label does not enter the loss (the value that PyTorch's cross-entropy skips)."""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One row as its task reads it; every task has its own subclass.

    Attributes:
        line: Line of the file where the row starts, from 1; 0 if it did not come from a file.
    """

    line: int = 0


class TaggedSentence(Example, frozen=True, kw_only=True):
    """Words, each with its IOB2 tag; `tags` is empty where nobody has tagged the sentence yet."""

    words: tuple[str, ...]
    tags: tuple[str, ...] = ()


class LabelledText(Example, frozen=True, kw_only=True):
    """A text, or a pair of texts, with its label; `label` is None where nobody has said it yet."""

    text: str
    pair: str | None = None
    label: str | None = None


class ScoredText(Example, frozen=True, kw_only=True):
    """A text, or a pair of texts, with its score; `score` is None where nobody has said it yet."""

    text: str
    pair: str | None = None
    score: float | None = None


def are_pairs(examples: Sequence[Example]) -> bool | None:
    """Whether rows are pairs of texts rather than single ones; None in tasks that do not have both."""
    row = examples[0]
    return row.pair is not None if isinstance(row, LabelledText | ScoredText) else None


class EncodedExample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One row as a model takes it, not padded.

    Attributes:
        input_ids: Token ids (T,).
        labels: One label per token (T,), or one for the row (); `IGNORED_LABEL`, or NaN if they are real, where none.
        token_type_ids: Segment of each token (T,), if the tokenizer makes them.
        position_ids: Position of each token (T,), where several rows share a context: from 0 in each of them.
        word_positions: For each word the index of its first token, -1 for a word without a token (W,).
        truncated: The row was longer than the context.
        truncated_words: Words that the context cut off.
        dropped_words: Words for which the tokenizer has no token at all.
    """

    input_ids: IntArray
    labels: LabelArray
    token_type_ids: IntArray | None = None
    position_ids: IntArray | None = None
    word_positions: IntArray | None = None
    truncated: bool = False
    truncated_words: int = 0
    dropped_words: int = 0

    @property
    def tokens(self) -> int:
        """Length of the row in tokens, T."""
        return len(self.input_ids)
