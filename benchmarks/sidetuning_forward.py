"""The device's part, once for all variants and seeds of a data set: what every block says of every token.

A frozen backbone without dropout gives the same activations in every epoch and for every seed, so they are computed
once, kept, and counted for each variant as if its device had computed them as often as the variant says.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.coordinator.feeders import EvaluationFeeder, TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.one_device import as_tensors
from coterie.jobs.side_spec import SideSpec
from coterie.measure.row_flops import count_row_flops
from coterie.models import PackedWeights, build_stage, config_of
from coterie.pipeline.micro_batch import MicroBatch
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.selection import select_tokens
from coterie.sidetuning.taps import TappedStage


class RowTaps:
    """Activations of the kept tokens of every row of a split, on disk.

    Attributes:
        positions: Of each row's kept tokens, (N_row,).
        loss: Which of them enter the loss, (M_row,), as indices among the kept.
        labels: Labels at these, (M_row,).
    """

    def __init__(self, path: Path, counts: Sequence[int], layers: int, width: int) -> None:
        starts = np.concatenate([[0], np.cumsum(counts)])
        self._starts: npt.NDArray[np.int64] = starts
        self._taps = np.memmap(path, np.float32, "w+", shape=(max(int(starts[-1]), 1), layers, width))
        self.positions: list[Tensor] = [torch.empty(0, dtype=torch.int64) for _ in counts]
        self.loss: list[Tensor] = [torch.empty(0, dtype=torch.int64) for _ in counts]
        self.labels: list[Tensor] = [torch.empty(0) for _ in counts]

    def put(self, row: int, taps: Tensor) -> None:
        """Keep a row's activations (N_row, L, D)."""
        self._taps[self._starts[row] : self._starts[row + 1]] = taps.numpy()

    def get(self, row: int, *, all_tokens: bool) -> Tensor:
        """A row's activations (N_row, L, D), or of the tokens that enter the loss (M_row, L, D); copied."""
        start, stop = self._starts[row], self._starts[row + 1]
        chosen = np.arange(start, stop) if all_tokens else start + self.loss[row].numpy()
        return torch.from_numpy(np.asarray(self._taps)[chosen])


class DevicePass:
    """A data set's activations, and what one pass over its training rows costs the device.

    Args:
        job: Of the frozen backbone; its epoch 0 is what the device runs over.
        folder: For the activations: gigabytes with a decoder.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self.blocks = job.anatomy.unit_count - 2
        self.width: int = config_of(job.spec).hidden_size
        stage = build_stage(job.spec, 0, self.blocks + 1, PackedWeights(job.weights, job.spec))
        self._backbone = TappedStage(stage)
        self._selector = TokenSelector(job.spec, SideSpec())
        self._flops = count_row_flops(job.spec)
        self.cpu_s = 0.0
        feeder = TrainingFeeder(job, 1)
        counts = [row.tokens for row in job.splits["train"].rows]
        self.train = RowTaps(folder / "train", counts, self.blocks, self.width)
        for step in range(job.steps_per_epoch):
            batch = as_tensors(step, 0, feeder.micro_batches(step)[0])
            self.cpu_s += self._run(batch, feeder.rows(step).rows, self.train, all_tokens=True)
        self.test = self._test(folder)
        del self._backbone

    def flops_of(self, padded_lengths: Sequence[int]) -> float:
        """Operations of a pass over rows of these padded lengths, up to the last block."""
        return self._flops.forward(padded_lengths, with_output_layer=False)

    def _test(self, folder: Path) -> RowTaps:
        """Activations of the test rows' own loss tokens: what their quality is counted on."""
        rows = self._job.splits["test"].rows
        counts = [self._job.task.count_loss_tokens(row.labels) for row in rows]
        kept = RowTaps(folder / "test", counts, self.blocks, self.width)
        feeder = EvaluationFeeder(self._job, "test", 1)
        for step in range(feeder.steps):
            (fed,) = feeder.micro_batches(step)
            self._run(as_tensors(step, 0, fed), feeder.rows(step), kept, all_tokens=False)
        return kept

    def _run(self, batch: MicroBatch, rows: Sequence[int], kept: RowTaps, *, all_tokens: bool) -> float:
        """Run a batch and keep its activations; the device's CPU seconds."""
        assert batch.labels is not None
        start_s = time.process_time()
        chosen = self._selector.select(batch.inputs, batch.labels)
        every = chosen
        if all_tokens:
            mask = batch.inputs["attention_mask"]
            every = select_tokens(batch.labels, mask, self._selector.reads, selects_tokens=False)
        _, taps = self._backbone.forward(batch.inputs, None, every)
        stacked = torch.stack([taps[layer] for layer in self._backbone.layers], dim=1)
        cpu_s = time.process_time() - start_s
        labels = chosen.loss_labels(batch.labels)
        for index, row in enumerate(rows):
            own, loss = every.rows == index, chosen.rows == index
            kept.positions[row] = every.positions[own]
            kept.loss[row] = torch.searchsorted(every.positions[own], chosen.positions[loss])
            kept.labels[row] = labels[loss]
            kept.put(row, stacked[own])
        return cpu_s
