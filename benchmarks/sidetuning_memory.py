"""Peak memory of the device under one way of training, in a process of its own.

`python benchmarks/sidetuning_memory.py JSON` with a `MemoryJob`: builds what the device holds, runs the batch of the
longest rows a few times, and prints the bytes above those before the model was built.
"""

import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from coterie.coordinator.job import Job
from coterie.jobs.side_spec import SideSpec
from coterie.measure.process_memory import current_rss_bytes, peak_rss_bytes, reset_peak
from coterie.models import PackedWeights, RandomKey, StageModule, build_stage
from coterie.pipeline.micro_batch import MicroBatch, split_batch
from coterie.pipeline.optimizer import StageOptimizer
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.taps import TappedStage
from coterie.tasks.collate import collate
from coterie.tensors.codecs import encode
from sidetuning_jobs import Jobs
from sidetuning_settings import SETTINGS, Variant, quick

_KEY = RandomKey(seed=0, step=0, micro_batch=0)
_STEPS = 3


class MemoryJob(msgspec.Struct, frozen=True, kw_only=True):
    """Which variant of which data set."""

    name: str
    variant: Variant
    is_quick: bool
    data: str | None


def measure(memory_job: MemoryJob) -> int:
    """The peak, in bytes above what the process had before it held anything of the model."""
    torch.set_num_threads(1)
    setting = next(setting for setting in SETTINGS if setting.name == memory_job.name)
    setting = quick(setting) if memory_job.is_quick else setting
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(setting, Path(folder), Path(memory_job.data) if memory_job.data else None)
        is_side = memory_job.variant not in {"bitfit-local", "bitfit-split", "lora-local"}
        method = "lora" if memory_job.variant == "lora-local" else "bitfit"
        job = jobs.frozen(0) if is_side else jobs.trained(method, 0)
        batch = longest_batch(job)
        gc.collect()
        idle = current_rss_bytes()
        reset_peak()
        if is_side:
            _forward_only(job, batch, selects_tokens=memory_job.variant in {"eco", "eco without TSTP"})
        else:
            last = job.anatomy.unit_count
            ends = memory_job.variant == "bitfit-split"
            _train(job, batch, ((0, 2), (last - 1, last)) if ends else ((0, last),))
        return peak_rss_bytes() - idle


def longest_batch(job: Job) -> MicroBatch:
    """The longest training rows as one batch."""
    data = job.splits["train"]
    order = np.argsort(-data.lengths, kind="stable")[: job.recipe.train.batch_rows]
    arrays = collate([data.rows[row] for row in order], pad_token_id=job.tokenizer.pad_token_id)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    labels = tensors.pop("labels")
    return split_batch(tensors, labels, micro_batches=1, step=0, samples_seen=0)[0]


def _forward_only(job: Job, batch: MicroBatch, *, selects_tokens: bool) -> None:
    side = SideSpec(selects_tokens=selects_tokens)
    weights = PackedWeights(job.weights, job.spec)
    backbone = TappedStage(build_stage(job.spec, 0, job.anatomy.unit_count - 1, weights))
    selector = TokenSelector(job.spec, side)
    for _ in range(_STEPS):
        _, taps = backbone.forward(batch.inputs, None, selector.select(batch.inputs, batch.labels))
        for layer, tensor in taps.items():
            encode(tensor, f"layer {layer}", "fp16")


def _train(job: Job, batch: MicroBatch, parts: Sequence[tuple[int, int]]) -> None:
    """Steps of the device's parts; between them stands a server whose tensors are made up."""
    assert batch.labels is not None
    stages = [build_stage(job.spec, *units, PackedWeights(job.weights, job.spec)) for units in parts]
    optimizers = [StageOptimizer(job.optimizer) for _ in stages]
    for _ in range(_STEPS):
        outputs = _forward(stages, batch)
        loss = job.task.loss_sum(outputs[-1], batch.labels) / batch.step_loss_tokens
        torch.autograd.backward(loss)
        if len(outputs) > 1:
            torch.autograd.backward(outputs[0], torch.randn_like(outputs[0]))
        for stage, optimizer in zip(stages, optimizers, strict=True):
            trained = stage.trainable()
            gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
            optimizer.apply(trained, gradients, job.optimizer.learning_rate)
            for parameter in trained.values():
                parameter.grad = None


def _forward(stages: Sequence[StageModule], batch: MicroBatch) -> list[Tensor]:
    outputs = [stages[0].forward(batch.inputs, None, _KEY)]
    if len(stages) > 1:
        outputs.append(stages[1].forward(batch.inputs, torch.randn_like(outputs[0]).requires_grad_(), _KEY))
    return outputs


if __name__ == "__main__":
    print(measure(msgspec.json.decode(sys.argv[1], type=MemoryJob)))
