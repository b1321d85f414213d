"""Quality of a side network on held-out data: the server predicts from its cache, the data's owner compares."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import torch
from torch import Tensor

from coterie.cluster.side_messages import COUNTS_TENSOR, PREDICTIONS_TENSOR, SAMPLES_TENSOR
from coterie.coordinator.evaluation import score
from coterie.coordinator.job import Job
from coterie.coordinator.side_feeding import Item, SideFeeder
from coterie.errors import ProtocolError
from coterie.metrics.records import EvaluationRecord
from coterie.sidetuning.additive import added
from coterie.sidetuning.selection import TokenSelection
from coterie.tasks.examples import PredictedArray
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame
from coterie.units import counted


class SideEvaluation:
    """Which tokens of a split's rows are predicted, and in additive mode the backbone's own logits there.

    Both are known once and serve every evaluation of the run; tokens are found again where a split came from the cache.

    Args:
        job: The run's.
        split: What is evaluated.
        feeder: Makes its micro-batches.
        base: Logits that an earlier session kept.
    """

    def __init__(
        self, job: Job, split: str, feeder: SideFeeder, base: Mapping[int, Tensor] = MappingProxyType({})
    ) -> None:
        self._job = job
        self._feeder = feeder
        self._split = split
        self._positions: dict[int, Tensor] = {}
        self._base: dict[int, Tensor] = dict(base)

    def know(self, item: Item) -> None:
        """Note which tokens of a micro-batch are predicted."""
        for row, positions in zip(item.due.rows, _by_row(item.selection), strict=True):
            self._positions[row] = positions

    def take_base(self, item: Item, frame: Frame) -> None:
        """Keep the backbone's own logits (M, C) of a micro-batch.

        Raises:
            ProtocolError: They are not of its tokens.
        """
        tensors = _tensors(frame)
        logits = next(iter(tensors.values()), torch.empty(0))
        sizes = [len(positions) for positions in _by_row(item.selection)]
        if len(tensors) != 1 or logits.ndim != 2 or len(logits) != sum(sizes):
            raise ProtocolError(f"a device's logits of {sum(sizes)} tokens came in the shape {tuple(logits.shape)}")
        for row, part in zip(item.due.rows, torch.split(logits, sizes), strict=True):
            self._base[row] = part

    @property
    def base(self) -> dict[int, Tensor]:
        """The backbone's own logits by row, as far as they have come."""
        return self._base

    def predictions(self, frames: list[Frame]) -> dict[int, PredictedArray]:
        """The task's predictions by row, each (T,) or (), from what the server sent.

        Raises:
            ProtocolError: It is not of these rows and tokens.
        """
        self._know_all()
        predicted: dict[int, PredictedArray] = {}
        for frame in frames:
            tensors = _tensors(frame)
            if set(tensors) != {SAMPLES_TENSOR, COUNTS_TENSOR, PREDICTIONS_TENSOR}:
                raise ProtocolError("predictions of a server came without their rows")
            counts = tensors[COUNTS_TENSOR].tolist()
            rows = tensors[SAMPLES_TENSOR].tolist()
            if len(rows) != len(counts) or sum(counts) != len(tensors[PREDICTIONS_TENSOR]):
                raise ProtocolError("predictions of a server are not of the rows that they name")
            for row, part in zip(rows, torch.split(tensors[PREDICTIONS_TENSOR], counts), strict=True):
                predicted[row] = self._placed(row, part)
        lacking = len(self._job.splits[self._split].rows) - len(predicted)
        if lacking:
            raise ProtocolError(f"a server left out {counted(lacking, 'row')} of {self._split}")
        return predicted

    def _know_all(self) -> None:
        """Also of rows that an earlier session has collected."""
        known = self._positions.keys()
        for due in self._feeder.due_of_split(self._split, known):
            self.know(self._feeder.item(0, due))

    def _placed(self, row: int, values: Tensor) -> PredictedArray:
        """One row's predictions, put where its tokens are."""
        if not 0 <= row < len(self._job.splits[self._split].rows) or len(values) != len(self._positions[row]):
            raise ProtocolError(f"a server predicted {len(values)} tokens of row {row}")
        if self._job.recipe.side.additive:
            values = self._job.task.predictions(added(self._base[row], values)) if len(values) else values.flatten()
        labels = len(self._job.task.labels)
        if labels and len(values) and not 0 <= int(values.min()) <= int(values.max()) < labels:
            raise ProtocolError(f"a server predicted a label of row {row} that is none of the {labels} labels")
        wanted = self._job.splits[self._split].rows[row].labels
        array = np.zeros(wanted.shape, wanted.dtype)
        if wanted.ndim:
            array[self._positions[row].numpy()] = values.numpy()
        elif len(values):
            array[()] = values[0].item()
        return array

    def record(
        self, predicted: Mapping[int, PredictedArray], loss_sum: float, step: int, seconds: float
    ) -> EvaluationRecord:
        """The figures."""
        found = score(self._job, self._split, predicted, loss_sum)
        loss = None if self._job.recipe.side.additive else found.loss  # the server knows no labels then
        return msgspec.structs.replace(
            found, step=step, epoch=-(-step // self._job.steps_per_epoch), seconds=seconds, loss=loss
        )


def _by_row(selection: TokenSelection) -> list[Tensor]:
    """Positions of the tokens that enter the loss, for each row."""
    index = torch.arange(len(selection.rows)) if selection.loss_index is None else selection.loss_index
    rows, positions = selection.rows[index], selection.positions[index]
    return list(torch.split(positions, torch.bincount(rows, minlength=len(selection.counts)).tolist()))


def _tensors(frame: Frame) -> dict[str, Tensor]:
    return {spec.name: decode(spec, data) for spec, data in zip(frame.header.tensors, frame.buffers, strict=True)}
