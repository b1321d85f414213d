"""A micro-batch, and how a batch is divided into them."""

from collections.abc import Mapping

import msgspec
from torch import Tensor

IGNORED_LABEL = -100


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some rows of one batch. Every stage gets the same one; labels may be left out before the last stage.

    A micro-batch without rows or without loss tokens contributes nothing, and every stage knows that from these
    numbers alone: nothing is computed for it and nothing is sent. Gradient accumulation is nothing else than more
    micro-batches: `micro_batches` of a schedule counts all that one optimizer step accumulates.

    Attributes:
        step: Optimizer step of the run.
        micro_batch: Index within the step, from 0.
        rows: Rows B; may be 0 (fewer rows than micro-batches).
        inputs: Keyword arguments of the model's forward, such as `input_ids` and `attention_mask`, each [B, T].
        labels: [B, T] or [B], -100 (real-valued ones: NaN) where there is no loss; None where a stage needs none.
        step_loss_tokens: Loss tokens of the whole step: what `flush`, `gpipe` and `2bw` divide the loss by.
        micro_batch_loss_tokens: Loss tokens of these rows: what `stash` divides by.
        samples_seen: Rows of the run before these; the learning rate is a function of it.
    """

    step: int
    micro_batch: int
    rows: int
    inputs: dict[str, Tensor]
    labels: Tensor | None
    step_loss_tokens: int
    micro_batch_loss_tokens: int
    samples_seen: int


def row_ranges(rows: int, micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Rows [start, stop) of each micro-batch: as even as can be, larger ones first, empty ones last."""
    share, extra = divmod(rows, micro_batches)
    ranges = []
    start = 0
    for index in range(micro_batches):
        stop = start + share + (1 if index < extra else 0)
        ranges.append((start, stop))
        start = stop
    return tuple(ranges)


def split_batch(
    inputs: Mapping[str, Tensor], labels: Tensor, *, micro_batches: int, step: int, samples_seen: int
) -> tuple[MicroBatch, ...]:
    """Divide one batch into micro-batches by rows; a loss token is a label that is not -100, and not NaN.

    Args:
        inputs: Tensors of R rows each, [R, T].
        labels: [R, T] or [R]; of a regression real-valued.
        micro_batches: How many; those beyond the rows are empty.
        step: The optimizer step that the batch belongs to.
        samples_seen: Rows of the run before this batch.
    """
    step_loss_tokens = _loss_tokens(labels)
    return tuple(
        MicroBatch(
            step=step,
            micro_batch=index,
            rows=stop - start,
            inputs={name: tensor[start:stop] for name, tensor in inputs.items()},
            labels=labels[start:stop],
            step_loss_tokens=step_loss_tokens,
            micro_batch_loss_tokens=_loss_tokens(labels[start:stop]),
            samples_seen=samples_seen + start,
        )
        for index, (start, stop) in enumerate(row_ranges(labels.shape[0], micro_batches))
    )


def _loss_tokens(labels: Tensor) -> int:
    labelled = labels.isnan().logical_not() if labels.is_floating_point() else labels.ne(IGNORED_LABEL)
    return int(labelled.sum())
