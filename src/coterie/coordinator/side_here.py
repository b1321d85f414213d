"""A side-tuning run repeated in this process alone, with the same arithmetic: to check what a cluster did."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from coterie.clock import SystemClock
from coterie.cluster.messages import PARAMETER
from coterie.coordinator.job import Job
from coterie.coordinator.one_device import OneDeviceRun
from coterie.coordinator.shards import ShardSource
from coterie.coordinator.side_feeding import Due, SideFeeder
from coterie.coordinator.side_spec import backbone_spec
from coterie.jobs.model_spec import ModelSpec
from coterie.measure.process_memory import current_rss_bytes, peak_rss_bytes, reset_peak
from coterie.models import MappingWeights, build_stage
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.additive import prediction_differences
from coterie.sidetuning.cache_layout import NO_QUOTA_BYTES, CacheLayout
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.side_model import build_side_model
from coterie.sidetuning.taps import TappedStage
from coterie.sidetuning.trainer import SideTrainer
from coterie.sidetuning.upload_codecs import UPLOAD_CODECS
from coterie.tensors.codecs import decode, encode


class SideHere:
    """Device and server in one: what is sent passes through the same codecs, what is kept through the same cache."""

    def __init__(self, job: Job, micro_batches: int) -> None:
        self._job = job
        self._side = job.recipe.side.spec
        self._feeder = SideFeeder(job, TokenSelector(job.spec, self._side), micro_batches)
        last = job.anatomy.unit_count - 1
        stop = job.anatomy.unit_count if self._side.mode == "additive" else last
        backbone = backbone_spec(job.spec)
        stage = build_stage(backbone, 0, stop, MappingWeights(self._read(backbone, range(stop))))
        self._tapped = TappedStage(stage, self._side.first_layer)
        model = build_side_model(job.spec, self._side, MappingWeights(self._read(job.spec, [last])))
        self._trainer = SideTrainer(model, job.task, job.optimizer)
        self._cache = self._new_cache()

    def train(self, steps: int) -> tuple[float, ...]:
        """The mean loss of each of the run's first steps."""
        per_epoch = self._job.steps_per_epoch
        losses = []
        for step in range(min(steps, self._job.total_steps)):
            epoch_begins = step % per_epoch == 0
            if step == 0 or (epoch_begins and not self._side.two_phases):
                self._cache = self._new_cache()
                self._collect(self._feeder.due_in_steps(step, min(step + per_epoch, self._job.total_steps)))
            rows = self._feeder.training.rows(step)
            done = self._trainer.step(self._cache.read(rows.rows), rows.samples_seen)
            losses.append(done.loss_sum / done.loss_tokens if done.loss_tokens else 0.0)
        return tuple(losses)

    def trained(self) -> Mapping[str, Tensor]:
        """All that was trained, by the names of `SideModel.parameters`."""
        return {name: parameter.detach() for name, parameter in self._trainer.model.parameters().items()}

    def _new_cache(self) -> ActivationCache:
        width, layers = self._trainer.model.network.width, self._tapped.layers
        layout = CacheLayout(layers=layers, width=width, dtype=self._side.upload, key={})
        return ActivationCache.open(None, layout, NO_QUOTA_BYTES)

    def _collect(self, due: Iterator[Due]) -> None:
        for number, one in enumerate(due):
            self._cache.put(self._forward(one), (number,))

    def _forward(self, due: Due) -> ActivationBatch:
        """One micro-batch as the server gets it."""
        item = self._feeder.item(0, due)
        inputs = {name: torch.from_numpy(array) for name, array in item.batch.inputs.items()}
        output, taps = self._tapped.forward(inputs, None, item.selection)
        stacked = torch.stack([taps[layer] for layer in self._tapped.layers], 1)
        sent = decode(*encode(stacked, "taps", UPLOAD_CODECS[self._side.upload]))
        labels = item.selection.loss_labels(torch.from_numpy(item.batch.labels))
        if self._side.mode == "additive":
            labels = prediction_differences(item.selection.loss_logits(output), labels)
        return ActivationBatch(
            samples=torch.tensor(due.rows),
            counts=item.selection.counts,
            layers=self._tapped.layers,
            taps=sent,
            labels=labels,
            loss_index=item.selection.loss_index,
        )

    def _read(self, spec: ModelSpec, units: Iterable[int]) -> dict[str, Tensor]:
        source = ShardSource(spec, self._job.weights, None)
        tensors: dict[str, Tensor] = {}
        for unit in units:
            tensors |= source.read(unit)
        return {name.removeprefix(PARAMETER): tensor for name, tensor in tensors.items()}


def run_side_here(job: Job, micro_batches: int, steps: int) -> OneDeviceRun:
    """Train the first `steps` steps of a side-tuning job in this process alone.

    Raises:
        ModelError: The weights cannot be read.
    """
    clock = SystemClock()
    base_bytes = current_rss_bytes()
    reset_peak()
    start_s = clock.now()
    losses = SideHere(job, micro_batches).train(steps)
    return OneDeviceRun(
        losses=losses, base_bytes=base_bytes, peak_bytes=peak_rss_bytes(), seconds=clock.now() - start_s
    )
