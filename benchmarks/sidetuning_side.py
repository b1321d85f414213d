"""Side-tuning by the parts of the server program, with the device's activations from `sidetuning_forward`."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from coterie import api
from coterie.checkpoint.export_record import ExportRecord
from coterie.coordinator.evaluation import score
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.jobs.side_spec import SideSpec
from coterie.models import PackedWeights
from coterie.planner.side_bytes import CODECS, Backbone, side_network_bytes
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.cache_layout import CacheLayout
from coterie.sidetuning.export import export_side, trained_side
from coterie.sidetuning.side_model import SideModel, build_side_model
from coterie.sidetuning.trainer import SideTrainer
from coterie.tasks.examples import PredictedArray
from coterie.tasks.task import GenerativeTask
from coterie.tensors.codecs import Codec, decode, encode
from coterie.units import GIB
from sidetuning_costs import EpochCost, Point, VariantRun
from sidetuning_forward import DevicePass, RowTaps
from sidetuning_local import padded_lengths
from sidetuning_settings import SideSetting, Variant

_CACHE_QUOTA = 64 * GIB
_MOST_NEW_TOKENS = 60
_EVALUATED_ROWS, _EVALUATED_ROWS_OF_TEXT = 128, 16
"""Rows of an evaluation batch; a causal model has a vocabulary of logits for each of many tokens in a row."""


class Received(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A batch as it came to the server, its bytes, and the device's and server's seconds of coding."""

    batch: ActivationBatch
    nbytes: int
    encode_s: float
    decode_s: float


class SideRun:
    """One variant with one seed and rank.

    Args:
        job: Of the frozen backbone, with the seed.
        device: Activations of the same rows.
        side: Settings.
        figure: Quality that is followed.

    Attributes:
        losses: Mean loss of each step so far.
    """

    def __init__(self, job: Job, device: DevicePass, side: SideSpec, figure: str) -> None:
        self._job = job
        self._device = device
        self._side = side
        self._figure = figure
        self.losses: list[float] = []
        self._feeder = TrainingFeeder(job, 1)
        self._model = build_side_model(job.spec, side, PackedWeights(job.weights, job.spec))
        self._trainer = SideTrainer(self._model, job.task, job.optimizer)
        layout = CacheLayout(layers=self._model.network.layers, width=device.width, dtype=side.upload, key={})
        self._cache = ActivationCache.open(None, layout, _CACHE_QUOTA)
        size = _EVALUATED_ROWS_OF_TEXT if isinstance(job.task, GenerativeTask) else _EVALUATED_ROWS
        count = len(job.splits["test"].rows)
        ranges = [range(start, min(start + size, count)) for start in range(0, count, size)]
        self._test = [(rows, batch_of(device.test, rows, self._model, all_tokens=False)) for rows in ranges]

    def rouge(self, test: Path, folder: Path) -> dict[str, float]:
        """ROUGE of texts that the exported network writes on its backbone, in points."""
        job = self._job
        trained = trained_side(self._side, self._model.parameters(), job.weights)
        record = ExportRecord(coterie="", run_id=job.run, step=self._trainer.steps, files=(), task=job.task.name)
        export_side(job.source, job.spec, trained, job.tokenizer.hf, folder, record=record)
        figures = api.evaluate(folder, test, max_new_tokens=_MOST_NEW_TOKENS).record
        found = {**figures.details, **figures.metrics}
        return {name: 100 * value for name, value in sorted(found.items()) if name.startswith("rouge")}

    @property
    def task_parameters(self) -> list[Tensor]:
        """Layers of the model that are trained too."""
        return list(self._model.output.trainable().values())

    @property
    def cache_bytes(self) -> int:
        """What the server keeps."""
        return self._cache.used_bytes if self._side.two_phases else 0

    def run_epoch(self, epoch: int) -> EpochCost:
        """Train an epoch; what it cost."""
        steps = self._job.steps_per_epoch
        is_live = epoch == 0 or not self._side.two_phases
        up_bytes, device_s, server_s = 0, 0.0, 0.0
        for step in range(epoch * steps, (epoch + 1) * steps):
            rows = self._feeder.rows(step)
            received = self._receive(rows.rows) if is_live else None
            start_s = time.process_time()
            if received is not None:
                batch = received.batch
                up_bytes += received.nbytes
                device_s += received.encode_s
                server_s += received.decode_s
                if self._side.two_phases:
                    self._cache.put(batch, (step,))
            else:
                batch = self._cache.read(rows.rows)
            done = self._trainer.step(batch, rows.samples_seen)
            self.losses.append(done.loss_sum / done.loss_tokens if done.loss_tokens else 0.0)
            server_s += time.process_time() - start_s
        if not is_live:
            return EpochCost(server_cpu_s=server_s)
        return EpochCost(
            device_flops=self._device.flops_of(padded_lengths(self._job, epoch)),
            device_cpu_s=self._device.cpu_s + device_s,
            server_cpu_s=server_s,
            up_bytes=up_bytes,
        )

    def _receive(self, rows: Sequence[int]) -> Received:
        """Encode a batch's activations as the device does, and decode them as the server does."""
        sent = batch_of(self._device.train, rows, self._model, all_tokens=not self._side.selects_tokens)
        codec: Codec = CODECS[self._side.upload]
        start_s = time.process_time()
        spec, buffer = encode(sent.taps, "taps", codec)
        encoded_s = time.process_time()
        taps = decode(spec, buffer)
        return Received(
            batch=msgspec.structs.replace(sent, taps=taps),
            nbytes=spec.nbytes,
            encode_s=encoded_s - start_s,
            decode_s=time.process_time() - encoded_s,
        )

    def evaluate(self) -> Point:
        """Quality on the test rows."""
        job, taps = self._job, self._device.test
        data = job.splits["test"].rows
        predicted, loss_sum = {}, 0.0
        for rows, batch in self._test:
            assert batch.labels is not None
            with torch.inference_mode():
                logits = self._model.logits(batch)
                loss_sum += float(job.task.loss_sum(logits, batch.labels))
                answers = job.task.predictions(logits).split(batch.counts.tolist())
            for row, answer in zip(rows, answers, strict=True):
                predicted[row] = _padded(answer, taps.positions[row], data[row].labels.ndim, data[row].tokens)
        record = score(job, "test", predicted, loss_sum)
        return Point(points=100 * record.metrics[self._figure], loss=record.loss or 0.0)


def batch_of(taps: RowTaps, rows: Sequence[int], model: SideModel, *, all_tokens: bool) -> ActivationBatch:
    """Rows as a batch of activations: of all tokens, or of those that enter the loss."""
    parts = [taps.get(row, all_tokens=all_tokens) for row in rows]
    counts = torch.tensor([len(part) for part in parts])
    starts = counts.cumsum(0) - counts
    first = model.side.first_layer - 1
    return ActivationBatch(
        samples=torch.tensor(list(rows)),
        counts=counts,
        layers=model.network.layers,
        taps=torch.cat(parts)[:, first:],
        labels=torch.cat([taps.labels[row] for row in rows]),
        loss_index=torch.cat([taps.loss[row] + start for row, start in zip(rows, starts, strict=True)])
        if all_tokens
        else None,
    )


def _padded(answer: Tensor, positions: Tensor, label_dimensions: int, tokens: int) -> PredictedArray:
    """A row's predictions as the task's metric wants them: one, or one for every token."""
    if not label_dimensions:
        return answer[0].numpy()
    every = torch.zeros(tokens, dtype=answer.dtype)
    every[positions] = answer
    return every.numpy()


def run_side(
    variant: Variant, job: Job, device: DevicePass, setting: SideSetting, *, rank: int, texts: tuple[Path, Path] | None
) -> VariantRun:
    """Train one variant to its last epoch, with its quality after each.

    Args:
        variant: Which.
        job: Of the frozen backbone, with the seed.
        device: Activations of the same rows.
        setting: The data set.
        rank: Of the side network.
        texts: Test data to write texts for, and a folder for the export; None to write none.
    """
    side = SideSpec(
        rank=rank,
        selects_tokens=variant in {"eco", "eco without TSTP"},
        two_phases=variant in {"eco", "eco without TS"},
    )
    run = SideRun(job, device, side, setting.figure)
    curve, costs = [], []
    for epoch in range(setting.epochs):
        costs.append(run.run_epoch(epoch))
        curve.append(run.evaluate())
    task_parameters = sum(parameter.numel() for parameter in run.task_parameters)
    backbone = Backbone(blocks=device.blocks, width=device.width)
    return VariantRun(
        variant=variant,
        seed=job.spec.seed,
        rank=rank,
        curve=tuple(curve),
        costs=tuple(costs),
        batches=job.steps_per_epoch,
        cache_bytes=run.cache_bytes,
        download_bytes=side_network_bytes(backbone, side, task_parameters=task_parameters),
        losses=tuple(run.losses),
        rouge=run.rouge(*texts) if texts is not None else {},
    )
