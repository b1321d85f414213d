"""Micro-batches of a side-tuning run: inputs and token positions to devices, rows and labels to the server."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import msgspec
import numpy as np
import torch

from coterie.cluster.messages import BatchBody, pack
from coterie.cluster.side_messages import (
    COUNTS_TENSOR,
    LABELS,
    LABELS_TENSOR,
    LOSS_INDEX_TENSOR,
    ORDER,
    PLAN_VERSION,
    POSITIONS_TENSOR,
    ROWS_TENSOR,
    SAMPLES_TENSOR,
    TRAIN,
    OrderBody,
    TapsBody,
)
from coterie.coordinator.feeders import EvaluationFeeder, TrainingFeeder
from coterie.coordinator.feeding import Audience, FedMicroBatch, batch_frame
from coterie.coordinator.job import Job
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.selection import TokenSelection
from coterie.tasks.examples import LabelArray
from coterie.transport.frame import Frame, FrameHeader, TensorSpec


class Due(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch that devices are still to run.

    Attributes:
        rows: Its rows' numbers within the split.
        make: Makes its arrays, when it is its turn.
        train_step: The optimizer step that it belongs to; -1 in `dev` and `test`.
    """

    split: str
    rows: tuple[int, ...]
    make: Callable[[], FedMicroBatch]
    train_step: int = -1


class Item(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch whose turn it is, under the number that all its frames have."""

    number: int
    due: Due
    batch: FedMicroBatch
    selection: TokenSelection


class SideFeeder:
    """What devices are to run, and in which order the server learns from it."""

    def __init__(self, job: Job, selector: TokenSelector, micro_batches: int) -> None:
        self._job = job
        self._micro_batches = micro_batches
        self._selector = selector
        self.training = TrainingFeeder(job, micro_batches)

    def due_in_steps(self, first_step: int, stop_step: int, held: AbstractSet[int] = frozenset()) -> Iterator[Due]:
        """The micro-batches of some optimizer steps of which the server lacks a row."""
        for step in range(first_step, stop_step):
            for index, rows in enumerate(self.training.rows(step).micro_batches):
                if not held >= set(rows):
                    yield Due(
                        split=TRAIN,
                        rows=rows,
                        make=lambda step=step, index=index: self.training.micro_batches(step)[index],  # type: ignore[misc]
                        train_step=step,
                    )

    def due_of_split(self, split: str, held: AbstractSet[int]) -> Iterator[Due]:
        """The micro-batches of a split that is evaluated of which the server lacks a row."""
        feeder = EvaluationFeeder(self._job, split, self._micro_batches)
        for step in range(feeder.steps):
            rows = tuple(feeder.rows(step))
            if not held >= set(rows):
                yield Due(split=split, rows=rows, make=lambda step=step: feeder.micro_batches(step)[0])  # type: ignore[misc]

    def item(self, number: int, due: Due) -> Item:
        """A micro-batch made, with the tokens whose activations are sent."""
        batch = due.make()
        inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        selection = self._selector.select(inputs, torch.from_numpy(batch.labels))
        return Item(number=number, due=due, batch=batch, selection=selection)

    def order_frame(self, epoch: int, first_step: int, run: RunId, target: WorkerId) -> Frame:
        """The rows of an epoch's steps from `first_step` on."""
        per_epoch = self._job.steps_per_epoch
        stop_step = min((epoch + 1) * per_epoch, self._job.total_steps)
        steps = [self.training.rows(step) for step in range(first_step, stop_step)]
        arrays = {
            "rows": np.array([row for step in steps for row in step.rows], np.int64),
            "stops": np.cumsum([len(step.rows) for step in steps], dtype=np.int64),
            "seen": np.array([step.samples_seen for step in steps], np.int64),
        }
        return _frame(ORDER, run, target, arrays, body=pack(OrderBody(epoch=epoch, first_step=first_step)))


def sent_tokens(job: Job, selector: TokenSelector, split: str) -> int:
    """Tokens of a split whose activations are sent, at most."""
    rows = job.splits[split].rows
    if not job.recipe.side.token_selector:
        return sum(row.tokens for row in rows)
    if selector.reads == "labelled":
        return sum(job.task.count_loss_tokens(row.labels) for row in rows)
    return len(rows)


def device_frame(item: Item, run: RunId, target: WorkerId, *, labelled: bool) -> Frame:
    """What a device needs of a micro-batch. Labels only go where differences are taken."""
    selection, due = item.selection, item.due
    inputs = dict(item.batch.inputs)
    inputs[ROWS_TENSOR] = selection.rows.numpy()
    inputs[POSITIONS_TENSOR] = selection.positions.numpy()
    inputs[COUNTS_TENSOR] = selection.counts.numpy()
    if selection.loss_index is not None:
        inputs[LOSS_INDEX_TENSOR] = selection.loss_index.numpy()
    body = BatchBody(rows=len(due.rows), step_loss_tokens=0, micro_batch_loss_tokens=0, samples_seen=0, split=due.split)
    batch = FedMicroBatch(body, inputs, item.batch.labels)
    return batch_frame(batch, run, PLAN_VERSION, (item.number, 0), Audience(worker=target, sees_labels=labelled))


def server_frame(item: Item, run: RunId, target: WorkerId, *, parts: int, labelled: bool) -> Frame:
    """What the server needs of a micro-batch beside the activations, which come in so many `parts`."""
    selection, due = item.selection, item.due
    arrays: dict[str, LabelArray] = {
        SAMPLES_TENSOR: np.array(due.rows, np.int64),
        COUNTS_TENSOR: selection.counts.numpy(),
    }
    if selection.loss_index is not None:
        arrays[LOSS_INDEX_TENSOR] = selection.loss_index.numpy()
    if labelled:
        arrays[LABELS_TENSOR] = selection.loss_labels(torch.from_numpy(item.batch.labels)).numpy()
    body = TapsBody(split=due.split, train_step=due.train_step, parts=parts)
    return _frame(LABELS, run, target, arrays, body=pack(body), step=item.number)


def _frame(
    kind: str, run: RunId, target: WorkerId, arrays: Mapping[str, LabelArray], *, body: bytes, step: int = 0
) -> Frame:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = FrameHeader(
        kind=kind,
        source=COORDINATOR,
        target=target,
        run=run,
        plan_version=PLAN_VERSION,
        step=step,
        body=body,
        tensors=tuple(
            TensorSpec(name=name, dtype=str(array.dtype), shape=array.shape, nbytes=array.nbytes)
            for name, array in contiguous.items()
        ),
    )
    return Frame(header, tuple(array.data.cast("B") for array in contiguous.values()))
