"""Micro-batches on their way to the stages: all stages get the input tensors, only the last gets the labels.

Where the plan keeps token ids on their owner's devices, others get zeros in their place: a model's forward asks for the
tensor, of which stages between the ends use the shape alone (`Anatomy.blocks_read_ids`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from coterie.cluster.messages import BATCH, BatchBody, pack
from coterie.errors import ProtocolError
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.planner.plan import Plan
from coterie.tasks.examples import LabelArray
from coterie.transport.frame import Frame, FrameHeader, TensorSpec

IDS = "input_ids"
"""Name of the token ids in a `BATCH` frame."""

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


class Audience(msgspec.Struct, frozen=True, kw_only=True):
    """Who a micro-batch is for, and what of it that worker may see."""

    worker: WorkerId
    sees_ids: bool = True
    sees_labels: bool = False


def audiences(plan: Plan, owned: Sequence[bool]) -> tuple[Audience, ...]:
    """Who is to see what of the data, for each stage; `owned`: whether its worker is on the data owner's device.

    Raises:
        ProtocolError: The data are to stay with their owner, and one of the ends is elsewhere.
    """
    trusted = [is_owned or not plan.keeps_data_local for is_owned in owned]
    if not (trusted[0] and trusted[-1]):
        raise ProtocolError("a plan that keeps the data local has an end on a device that does not own them")
    last = len(plan.stages) - 1
    return tuple(
        Audience(worker=stage.worker, sees_ids=is_trusted, sees_labels=number == last)
        for number, (stage, is_trusted) in enumerate(zip(plan.stages, trusted, strict=True))
    )


def without_ids(arrays: Mapping[str, LabelArray]) -> dict[str, LabelArray]:
    """The same tensors with zeros in the place of token ids."""
    return {name: np.zeros_like(array) if name == IDS else array for name, array in arrays.items()}


def batch_frame(batch: FedMicroBatch, run: RunId, plan_version: int, place: tuple[int, int], target: Audience) -> Frame:
    """The `BATCH` frame of one micro-batch for one stage; `place` is (step, micro-batch)."""
    arrays = dict(batch.inputs) if target.sees_ids else without_ids(batch.inputs)
    if target.sees_labels and batch.body.rows:
        arrays[LABELS] = batch.labels
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = tuple(
        TensorSpec(name=name, dtype=str(array.dtype), shape=array.shape, nbytes=array.nbytes)
        for name, array in contiguous.items()
    )
    header = FrameHeader(
        kind=BATCH,
        source=COORDINATOR,
        target=target.worker,
        run=run,
        plan_version=plan_version,
        step=place[0],
        micro_batch=place[1],
        body=pack(batch.body),
        tensors=specs,
    )
    return Frame(header, tuple(array.data.cast("B") for array in contiguous.values()))
