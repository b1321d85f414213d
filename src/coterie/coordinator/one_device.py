"""The same run on one device: the whole, uncut model in an ordinary PyTorch loop, to compare a pipeline with."""

import msgspec
import torch

from coterie.clock import SystemClock
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.feeding import FedMicroBatch
from coterie.coordinator.job import Job
from coterie.measure.process_memory import current_rss_bytes, peak_rss_bytes, reset_peak
from coterie.models.whole import load_whole_model
from coterie.pipeline.micro_batch import MicroBatch
from coterie.pipeline.single_device import SingleDeviceTrainer


class OneDeviceRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one device did.

    Attributes:
        losses: Mean loss of each optimizer step, from step 0.
        base_bytes: The process before it held the model.
        peak_bytes: Its peak while training.
        seconds: Wall time of the steps.
    """

    losses: tuple[float, ...]
    base_bytes: int
    peak_bytes: int
    seconds: float


def run_on_one_device(job: Job, micro_batches: int, steps: int) -> OneDeviceRun:
    """Train the first `steps` steps of a job on this process alone.

    Raises:
        ModelError: The weights cannot be read.
    """
    clock = SystemClock()
    feeder = TrainingFeeder(job, micro_batches)
    base_bytes = current_rss_bytes()
    reset_peak()
    model = load_whole_model(job.spec, job.weights)
    trainer = SingleDeviceTrainer(model, job.anatomy, job.optimizer, job.task, seed=job.spec.seed)
    losses = []
    start_s = clock.now()
    for step in range(min(steps, job.total_steps)):
        fed = feeder.micro_batches(step)
        done = trainer.run_step([as_tensors(step, index, batch) for index, batch in enumerate(fed)])
        losses.append(done.loss_sum / done.loss_tokens if done.loss_tokens else 0.0)
    return OneDeviceRun(
        losses=tuple(losses), base_bytes=base_bytes, peak_bytes=peak_rss_bytes(), seconds=clock.now() - start_s
    )


def largest_difference(losses: tuple[float, ...], others: tuple[float, ...]) -> float:
    """The largest relative difference between two loss curves, over the steps that both have."""
    pairs = zip(losses, others, strict=False)
    return max((abs(one - other) / max(abs(one), abs(other), 1e-12) for one, other in pairs), default=0.0)


def as_tensors(step: int, index: int, fed: FedMicroBatch) -> MicroBatch:
    """A fed micro-batch as a stage takes it: numpy's arrays, shared, as tensors."""
    return MicroBatch(
        step=step,
        micro_batch=index,
        rows=fed.body.rows,
        inputs={name: torch.from_numpy(array) for name, array in fed.inputs.items()},
        labels=torch.from_numpy(fed.labels),
        step_loss_tokens=fed.body.step_loss_tokens,
        micro_batch_loss_tokens=fed.body.micro_batch_loss_tokens,
        samples_seen=fed.body.samples_seen,
    )
