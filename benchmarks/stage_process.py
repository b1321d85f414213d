"""One stage in a process of its own: builds it with random weights, runs some steps, prints its peak above idle.

`python benchmarks/stage_process.py JSON` with a `StageJob`; what a neighbour would send is made up here, so that one
stage's memory is measured without the others. Prints one JSON line, a `StageMemory`.
"""

import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.measure.allocator import use_tight_allocator
from coterie.measure.device_profile import idle_bytes
from coterie.measure.process_memory import current_rss_bytes, peak_rss_bytes, reset_peak
from coterie.measure.stand_in_weights import StandInWeights
from coterie.models import build_stage, describe
from coterie.models.block_quantizer import load_before_peft
from coterie.pipeline.executor import StageExecutor
from coterie.pipeline.executor_settings import ExecutorSettings
from coterie.pipeline.micro_batch import MicroBatch, row_ranges
from coterie.pipeline.optimizer import StageOptimizer
from coterie.pipeline.reports import MicroBatchReport, StepReport
from coterie.planner.plan import Allocator
from coterie.schedules import make_schedule
from coterie.schedules.actions import ScheduleKind
from coterie.tasks.catalog import get_task

_Result = TypeVar("_Result")


class StageJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: units of a model under a schedule, as in a plan's stage."""

    spec: ModelSpec
    units: tuple[int, int]
    stage: int
    in_flight: tuple[int, ...]
    schedule: ScheduleKind
    batch_rows: int
    micro_batches: int
    tokens: int
    width: int
    recompute: bool = False
    allocator: Allocator = "default"
    steps: int = 2
    task: str = "token-classification"


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident bytes: before the stage was built, when it stood, and the most while it ran; CPU seconds of the run."""

    idle_bytes: int
    built_bytes: int
    peak_bytes: int
    cpu_s: float


class MadeUpNeighbours:
    """`StagePorts` that give random tensors of the right shapes and drop what is sent."""

    def __init__(self, job: StageJob, labels: int) -> None:
        self._job = job
        self._labels = labels
        self._rows = [stop - start for start, stop in row_ranges(job.batch_rows, job.micro_batches)]
        self.cpu_s = 0.0

    def take_batch(self, step: int, micro_batch: int) -> MicroBatch:
        """See `StagePorts`."""
        rows, tokens = self._rows[micro_batch], self._job.tokens
        return MicroBatch(
            step=step,
            micro_batch=micro_batch,
            rows=rows,
            inputs={
                "input_ids": torch.randint(0, 100, (rows, tokens)),
                "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
            },
            labels=torch.randint(0, self._labels, (rows, tokens)),
            step_loss_tokens=self._job.batch_rows * tokens,
            micro_batch_loss_tokens=rows * tokens,
            samples_seen=step * self._job.batch_rows,
        )

    def take_hidden(self, step: int, micro_batch: int) -> Tensor:
        """See `StagePorts`."""
        del step
        return torch.randn(self._rows[micro_batch], self._job.tokens, self._job.width)

    def put_hidden(self, step: int, micro_batch: int, hidden: Tensor) -> None:
        """See `StagePorts`."""

    def take_gradient(self, step: int, micro_batch: int) -> Tensor:
        """See `StagePorts`."""
        return self.take_hidden(step, micro_batch) * 1e-4

    def put_gradient(self, step: int, micro_batch: int, gradient: Tensor) -> None:
        """See `StagePorts`."""

    def take_done(self, step: int, micro_batch: int) -> None:
        """See `StagePorts`."""

    def put_done(self, step: int, micro_batch: int) -> None:
        """See `StagePorts`."""

    def put_predictions(self, step: int, micro_batch: int, predictions: Tensor) -> None:
        """See `StagePorts`."""

    def total_squared_norm(self, step: int, unit_squared_norms: Mapping[int, float]) -> float:
        """See `StagePorts`."""
        del step
        return sum(unit_squared_norms.values())

    def exchange_tied(self, step: int, gradient: Tensor) -> Tensor:
        """See `StagePorts`."""
        del step
        return gradient + torch.zeros_like(gradient)

    def micro_batch_done(self, report: MicroBatchReport) -> None:
        """See `StagePorts`."""

    def step_done(self, report: StepReport) -> None:
        """See `StagePorts`."""
        self.cpu_s += report.cpu_s


def measure(job: StageJob) -> StageMemory:
    """Run the job in this process."""
    torch.set_num_threads(1)
    if job.allocator == "tight":
        use_tight_allocator()
    describe(job.spec)
    if job.spec.lora is not None:
        load_before_peft()
        importlib.import_module("peft")  # an idle worker has both, from the time when it measured its speed
    idle = idle_bytes("cpu")
    stage = _in_thread(lambda: build_stage(job.spec, *job.units, StandInWeights(job.spec)))
    ports = MadeUpNeighbours(job, labels=9)
    executor = StageExecutor(
        stage,
        StageOptimizer(OptimizerSpec(learning_rate=1e-5, lr_schedule="constant")),
        get_task(job.task),
        ports,
        ExecutorSettings(
            seed=0,
            sends_gradient=_trains_below(job),
            recompute=job.recompute,
        ),
    )
    schedule = make_schedule(
        job.schedule,
        stages=len(job.in_flight),
        micro_batches=job.micro_batches,
        steps=job.steps,
        in_flight=job.in_flight,
    )
    gc.collect()
    built = current_rss_bytes()
    reset_peak()
    _in_thread(lambda: executor.run_segment(schedule, job.stage, 0))
    return StageMemory(idle_bytes=idle, built_bytes=built, peak_bytes=peak_rss_bytes(), cpu_s=ports.cpu_s)


def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Run in a thread of its own, as a worker does: there glibc's allocator behaves in another way."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work).result()


def _trains_below(job: StageJob) -> bool:
    return any(describe(job.spec).trainable[: job.units[0]])


if __name__ == "__main__":
    print(msgspec.json.encode(measure(msgspec.json.decode(sys.argv[1], type=StageJob))).decode())
