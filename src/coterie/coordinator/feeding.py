"""Micro-batches on their way to the stages: all stages get the input tensors, only the last gets the labels."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from coterie.cluster.messages import BATCH, BatchBody, pack
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.tasks.examples import LabelArray
from coterie.transport.frame import Frame, FrameHeader, TensorSpec

LABELS = "labels"
"""Name of the label tensor in a `BATCH` frame."""


class FedMicroBatch:
    """One micro-batch as arrays: `inputs` by name [B, T] int64, `labels` [B, T] or [B]; no arrays if it has no rows."""

    __slots__ = ("body", "inputs", "labels")

    def __init__(self, body: BatchBody, inputs: Mapping[str, LabelArray], labels: LabelArray) -> None:
        self.body = body
        self.inputs = inputs
        self.labels = labels


class Feeder(Protocol):
    """Where the training loop gets a step's micro-batches from."""

    def micro_batches(self, step: int) -> tuple[FedMicroBatch, ...]:
        """All micro-batches of an optimizer step, in order; empty ones included."""
        ...


def batch_frame(
    batch: FedMicroBatch, run: RunId, plan_version: int, place: tuple[int, int], target: WorkerId, *, labelled: bool
) -> Frame:
    """The `BATCH` frame of one micro-batch for one stage; `place` is (step, micro-batch)."""
    arrays = dict(batch.inputs)
    if labelled and batch.body.rows:
        arrays[LABELS] = batch.labels
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = tuple(
        TensorSpec(name=name, dtype=str(array.dtype), shape=array.shape, nbytes=array.nbytes)
        for name, array in contiguous.items()
    )
    header = FrameHeader(
        kind=BATCH,
        source=COORDINATOR,
        target=target,
        run=run,
        plan_version=plan_version,
        step=place[0],
        micro_batch=place[1],
        body=pack(batch.body),
        tensors=specs,
    )
    return Frame(header, tuple(array.data.cast("B") for array in contiguous.values()))
