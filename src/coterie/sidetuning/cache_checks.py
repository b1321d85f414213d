"""What a batch must be before a cache takes it, and whether two batches say the same."""

import torch
from torch import Tensor

from coterie.errors import ModelError, ProtocolError
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.cache_layout import CacheLayout


def check_shape(batch: ActivationBatch, layout: CacheLayout) -> None:
    """Check that a batch has the layout's layers, finite numbers, and every sample once.

    Raises:
        ModelError: An activation is not finite.
        ProtocolError: The batch has other layers or another width, or a sample twice.
    """
    if batch.layers != layout.layers or batch.taps.shape[2] != layout.width:
        raise ProtocolError(
            f"activations of layers {batch.layers} and width {batch.taps.shape[2]} do not belong into a cache of "
            f"layers {layout.layers} and width {layout.width}"
        )
    if len(set(batch.samples.tolist())) < batch.rows:
        raise ProtocolError(f"a batch names a sample twice: {batch.samples.tolist()}")
    if not bool(batch.taps.isfinite().all()):
        raise ModelError(
            f"the backbone's activations of samples {batch.samples.tolist()} hold NaN or infinity",
            hint="check the model: do its weights hold NaN, or do they overflow in plain transformers, too?",
        )


def same_content(one: ActivationBatch, other: ActivationBatch) -> bool:
    """Do two batches of the same layers say the same? Labels are compared where both have them."""
    same_taps = (
        torch.equal(one.samples, other.samples)
        and torch.equal(one.counts, other.counts)
        and torch.equal(one.taps, other.taps)
    )
    if not same_taps or one.labels is None or other.labels is None:
        return same_taps
    return _same(one.labels, other.labels) and _same(one.loss_index, other.loss_index)


def kind_of(batch: ActivationBatch) -> str:
    """What labels a batch has, in words: batches of different kinds could not be read together."""
    tokens = "all tokens" if batch.loss_index is None else "some tokens"
    if batch.labels is None:
        return f"no labels, {tokens} in the loss"
    return f"labels of {batch.labels.dtype} {tuple(batch.labels.shape[1:])}, {tokens} in the loss"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
