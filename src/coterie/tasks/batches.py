"""In which order rows are learnt: a pure function of (seed, epoch), so that a resume needs to store no state.

Random bits come from numpy's Philox keyed by (seed, epoch) and are read raw: numpy promises that raw streams never
change, which it does not for `permutation` or `shuffle`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from coterie.errors import DataError, RecipeError
from coterie.tasks.examples import IntArray

_POOL_BATCHES = 50
"""Batches sorted by length together, at most; a quarter of an epoch if that is less, so that batches stay mixed."""

_MASK_64 = 2**64 - 1


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an epoch is cut into optimizer steps and these into micro-batches.

    Attributes:
        group_by_length: Put rows of similar length into one batch, at random otherwise: less padding, and
            micro-batches of equal cost, which keeps a pipeline's stages in step.
    """

    batch_rows: int = 8
    micro_batches: int = 4
    epochs: int = 1
    seed: int = 0
    group_by_length: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_rows", "micro_batches", "epochs"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} is {getattr(self, name)}", hint="it must be at least 1")


class StepRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one optimizer step.

    Attributes:
        step: Number of the step in the run, from 0.
        epoch: Its epoch, from 0.
        samples_seen: Rows of the run before this step.
        micro_batches: Row indices of each micro-batch; those beyond the rows are empty.
    """

    step: int
    epoch: int
    samples_seen: int
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """All row indices of the step, in order."""
        return tuple(row for part in self.micro_batches for row in part)


def steps_per_epoch(row_count: int, batch_rows: int) -> int:
    """Optimizer steps of one epoch; the last may have fewer rows."""
    return -(-row_count // batch_rows)


def _random_order(bits: np.random.Philox, count: int) -> IntArray:
    """A permutation of `count`; equal keys (of 64 bits) keep their order, so it is defined in every case."""
    return np.argsort(bits.random_raw(count), kind="stable")


def _epoch_order(lengths: IntArray, settings: BatchSettings, epoch: int) -> IntArray:
    """All row indices (N,) in the order of an epoch; batch k is the k-th slice of `batch_rows`."""
    bits = np.random.Philox(key=np.array([settings.seed & _MASK_64, epoch], dtype=np.uint64))
    order = _random_order(bits, len(lengths))
    size = settings.batch_rows
    full = len(order) // size
    if not settings.group_by_length or full < 2:
        return order
    pool = max(1, min(_POOL_BATCHES, full // 4)) * size
    for start in range(0, full * size, pool):
        part = order[start : min(start + pool, full * size)]
        order[start : start + len(part)] = part[np.argsort(-lengths[part], kind="stable")]
    batches = order[: full * size].reshape(full, size)[_random_order(bits, full)]
    return np.concatenate([batches.ravel(), order[full * size :]])


def _split_rows(rows: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous parts, sizes differing by at most one, larger ones first, empty ones last."""
    share, extra = divmod(len(rows), parts)
    starts = [index * share + min(index, extra) for index in range(parts + 1)]
    return tuple(tuple(rows[start:stop]) for start, stop in pairwise(starts))


def epoch_steps(lengths: IntArray, settings: BatchSettings, epoch: int) -> tuple[StepRows, ...]:
    """The steps of one epoch, in order.

    Args:
        lengths: Tokens of each row (N,).
        settings: Equal for the whole run.
        epoch: From 0.
    """
    order = _epoch_order(lengths, settings, epoch).tolist()
    count = steps_per_epoch(len(order), settings.batch_rows)
    return tuple(
        StepRows(
            step=epoch * count + index,
            epoch=epoch,
            samples_seen=epoch * len(order) + start,
            micro_batches=_split_rows(order[start : start + settings.batch_rows], settings.micro_batches),
        )
        for index, start in enumerate(range(0, len(order), settings.batch_rows))
    )


def plan_steps(lengths: IntArray, settings: BatchSettings, *, first_step: int = 0) -> Iterator[StepRows]:
    """The steps of a run from `first_step` on: a resumed run takes exactly the rows that the first would have.

    Raises:
        DataError: There are no rows.
    """
    if not len(lengths):
        raise DataError("there are no rows to learn from", hint="check the training data")
    per_epoch = steps_per_epoch(len(lengths), settings.batch_rows)
    first_epoch, skipped = divmod(first_step, per_epoch)
    for epoch in range(first_epoch, settings.epochs):
        yield from epoch_steps(lengths, settings, epoch)[skipped:]
        skipped = 0


def evaluation_batches(lengths: IntArray, batch_rows: int) -> tuple[tuple[int, ...], ...]:
    """All rows, longest first, in batches of `batch_rows`: the least padding, and too long a row fails at once."""
    order = np.argsort(-lengths, kind="stable").tolist()
    return tuple(tuple(order[start : start + batch_rows]) for start in range(0, len(order), batch_rows))


class BatchShapes(msgspec.Struct, frozen=True, kw_only=True):
    """The shapes that a run's micro-batches have: what memory and time depend on.

    Attributes:
        memory_tokens: Padded length of the longest micro-batch.
        typical_tokens: Mean padded length of a row, rounded.
        largest_micro_batch_rows: Rows of the largest micro-batch.
        row_tokens: Tokens of all rows over all epochs.
        padded_tokens: The same with padding: what is computed.
        steps: Optimizer steps of the run.
    """

    memory_tokens: int
    typical_tokens: int
    largest_micro_batch_rows: int
    row_tokens: int
    padded_tokens: int
    steps: int

    @property
    def padding_share(self) -> float:
        """Part of the computed tokens that is padding."""
        return 1.0 - self.row_tokens / self.padded_tokens


def batch_shapes(lengths: IntArray, settings: BatchSettings, *, pad_to_multiple: int = 1) -> BatchShapes:
    """The shapes of a whole run, all epochs counted.

    Raises:
        DataError: There are no rows.
    """
    longest = most_rows = padded = rows = steps = 0
    for step in plan_steps(lengths, settings):
        steps += 1
        for part in filter(None, step.micro_batches):
            width = padded_length(int(lengths[list(part)].max()), pad_to_multiple)
            longest, most_rows = max(longest, width), max(most_rows, len(part))
            padded += width * len(part)
            rows += len(part)
    return BatchShapes(
        memory_tokens=longest,
        typical_tokens=round(padded / rows),
        largest_micro_batch_rows=most_rows,
        row_tokens=int(lengths.sum()) * settings.epochs,
        padded_tokens=padded,
        steps=steps,
    )


def padded_length(tokens: int, pad_to_multiple: int) -> int:
    """The length to which a micro-batch is padded whose longest row has `tokens` tokens."""
    return -(-tokens // pad_to_multiple) * pad_to_multiple
