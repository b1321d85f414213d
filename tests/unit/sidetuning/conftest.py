"""Made-up activations whose numbers follow from the samples' ids."""

import pytest
import torch

from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.cache_layout import CacheLayout


def made_up_batch(samples, *, layers=(1, 2, 3), width=8, tokens=None, in_loss="all"):
    """Rows of 1, 2, 3, 1, ... tokens (or `tokens` each) with a label for each token of the loss: all, or the last."""
    counts = [tokens if tokens is not None else 1 + sample % 3 for sample in samples]
    taps = [
        torch.randn(count, 16, width, generator=torch.Generator().manual_seed(sample))
        for sample, count in zip(samples, counts, strict=True)
    ]
    all_taps = torch.cat(taps) if taps else torch.empty(0, 16, width)
    labels = [sample * 100 + token for sample, count in zip(samples, counts, strict=True) for token in range(count)]
    loss_index = None
    if in_loss == "last":
        loss_index = torch.tensor(counts).cumsum(0) - 1
        labels = [labels[index] for index in loss_index]
    return ActivationBatch(
        samples=torch.tensor(samples, dtype=torch.int64),
        counts=torch.tensor(counts, dtype=torch.int64),
        layers=tuple(layers),
        taps=all_taps[:, list(layers)],
        labels=torch.tensor(labels, dtype=torch.int64),
        loss_index=loss_index,
    )


@pytest.fixture
def batch_of():
    return made_up_batch


@pytest.fixture
def layout():
    return CacheLayout(
        layers=(1, 2, 3), width=8, dtype="float32", key={"model": "a" * 64, "max_tokens": "128", "tokens": "last"}
    )


@pytest.fixture
def same():
    """Whether two batches say the same, bit for bit."""

    def compare(one, other):
        def equal(a, b):
            return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)

        names = ("samples", "counts", "taps", "labels", "loss_index")
        return one.layers == other.layers and all(equal(getattr(one, n), getattr(other, n)) for n in names)

    return compare
