"""Tokens with what is learnt of them into a model's rows: labels shifted, long texts cut, short rows packed."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coterie.tasks.examples import IGNORED_LABEL, EncodedExample, IntArray


class TokenRow(NamedTuple):
    """Token ids, and for each whether the model learns to write it; equally many of both."""

    ids: list[int]
    learnt: list[bool]

    def add(self, ids: Sequence[int], *, learnt: bool) -> None:
        """Append tokens that are all learnt or all not."""
        self.ids.extend(ids)
        self.learnt.extend([learnt] * len(ids))


def encode_tokens(row: TokenRow, max_tokens: int, *, truncated: bool = False) -> EncodedExample:
    """A row whose label at t is the token t + 1, where that is learnt; what exceeds `max_tokens` is cut off its end.

    Args:
        row: Tokens, and which of them are learnt.
        max_tokens: Most tokens of the result.
        truncated: Something was cut off before.
    """
    ids = np.array(row.ids[:max_tokens], dtype=np.int64)
    labels = np.full(len(ids), IGNORED_LABEL, dtype=np.int64)
    following = np.array(row.learnt[1 : len(ids)], dtype=bool)
    labels[: len(following)][following] = ids[1:][following]
    return EncodedExample(input_ids=ids, labels=labels, truncated=truncated or len(row.ids) > max_tokens)


def cut_left(ids: Sequence[int], kept_first: int, max_tokens: int) -> IntArray:
    """At most `max_tokens` ids (T,): the first special ones, then the last ones, which lead over to the answer.

    Args:
        ids: A whole prompt.
        kept_first: Special tokens at its beginning, which stay.
        max_tokens: Most ids of the result, at least 1.
    """
    if len(ids) > max_tokens:
        kept_first = min(kept_first, max_tokens - 1)
        ids = [*ids[:kept_first], *ids[len(ids) - (max_tokens - kept_first) :]]
    return np.array(ids, dtype=np.int64)


def pack_rows(rows: Sequence[EncodedExample], max_tokens: int) -> tuple[EncodedExample, ...]:
    """Rows side by side in contexts of at most `max_tokens`, each where it leaves the least room: long rows first.

    Positions count from 0 in each row, which tells the model where one begins; no row sees another.
    """
    lengths = [row.tokens for row in rows]
    contexts: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(rows)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(rooms, (lengths[index], -1))
        if place < len(rooms):
            room, context = rooms.pop(place)
        else:
            room, context = max_tokens, len(contexts)
            contexts.append([])
        contexts[context].append(index)
        insort(rooms, (room - lengths[index], context))
    return tuple(_joined([rows[index] for index in sorted(context)]) for context in contexts)


def _joined(rows: Sequence[EncodedExample]) -> EncodedExample:
    return EncodedExample(
        input_ids=np.concatenate([row.input_ids for row in rows]),
        labels=np.concatenate([row.labels for row in rows]).astype(np.int64),
        position_ids=np.concatenate([np.arange(row.tokens) for row in rows]),
        truncated=any(row.truncated for row in rows),
    )
