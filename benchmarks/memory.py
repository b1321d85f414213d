"""Peak memory of pipelines planned for the least of it, against one device, and against what was predicted.

Every stage runs in a process of its own (`stage_process.py`: the worker's executor, made-up neighbours), one after the
other; its peak counts above the idle worker. Peaks do not depend on how busy the machine is. Takes about half an hour
of one quiet core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coterie.ids import WorkerId
from coterie.jobs.model_spec import LoraSpec, ModelSpec, TrainableMethod
from coterie.measure.model_profile import profile_model
from coterie.models import make_model_spec, open_model
from coterie.planner import PlanRequest, StageAssignment, make_plan
from coterie.planner.plan import Allocator, Plan
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile
from coterie.profiles.model_profile import ModelProfile
from coterie.schedules.actions import ScheduleKind
from coterie.units import MIB
from made_up import SHAPES, make_model
from reporting import Report, parse_arguments
from stage_process import StageJob, StageMemory

PROGRAM = Path(__file__).with_name("stage_process.py")
TOKENS = 128
LABELS = 9
STEPS = 2
"""The optimizer's state comes up in the first step; the second is as all that follow."""

FIGURE_BATCH = 8
"""Rows of the optimizer step that the figures are about, as in the paper."""

FURTHER_BATCHES = (4, 16)
LAST_BLOCKS = ("block 4", "block 5")
"""MiniLM's last two; two in the middle of BERT-base, with frozen ones above them that pass gradients on."""

ALLOCATORS: tuple[Allocator, ...] = ("default", "tight")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train a batch; what is left open is the planner's choice.

    Attributes:
        trainable: Patterns of what is trained; empty: all that the method trains.
        micro_batches: Of a step; None: the planner's choice.
        recompute: Whether blocks run forward again in backward; None: the planner's choice.
    """

    name: str
    stages: int = 3
    schedule: ScheduleKind = "flush"
    method: TrainableMethod = "full"
    trainable: tuple[str, ...] = ()
    micro_batches: int | None = None
    recompute: bool | None = None


SINGLE = Row(name="one device, whole batch", stages=1, micro_batches=1, recompute=False)
FLUSH = Row(name="flush")
STASH = Row(name="stash", schedule="stash")
MODES = (
    Row(name="recomputing", micro_batches=4, recompute=True),
    Row(name="LoRA", method="lora", micro_batches=4, recompute=False),
    Row(name="one device, LoRA", stages=1, method="lora", micro_batches=4, recompute=False),
)
"""Measured at `FIGURE_BATCH` only: how well other settings are predicted."""

PARTS = (
    Row(name="head only", method="head", micro_batches=4, recompute=False),
    Row(name="LoRA on the last two blocks", method="lora", trainable=LAST_BLOCKS, micro_batches=4, recompute=False),
    Row(name="LoRA there, recomputing", method="lora", trainable=LAST_BLOCKS, micro_batches=4, recompute=True),
    Row(name="BitFit", method="bitfit", micro_batches=4, recompute=False),
)
"""Measured at `FIGURE_BATCH`, the quick run included: stages below all that is trained run forward only."""


SAME_MICRO_BATCHES = "micro-batched"
"""Key of the one device that runs as many micro-batches as the planned `flush` pipeline."""


def micro_batched(count: int) -> Row:
    """One device with as many micro-batches as a pipeline."""
    return Row(name=f"one device, {count} micro-batches", stages=1, micro_batches=count, recompute=False)


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: what the plan says and what its process took, above the idle worker."""

    place: StageAssignment
    measured_bytes: int

    @property
    def predicted_bytes(self) -> int:
        """The plan's figure."""
        return self.place.memory.above_base

    @property
    def error(self) -> float:
        """By how much the prediction is too high, relative to what was measured."""
        return self.predicted_bytes / self.measured_bytes - 1


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row, run."""

    row: Row
    plan: Plan
    stages: tuple[StageResult, ...]

    @property
    def mean(self) -> float:
        """Mean peak of its devices."""
        return statistics.fmean(stage.measured_bytes for stage in self.stages)

    @property
    def fullest(self) -> int:
        """Peak of its fullest device."""
        return max(stage.measured_bytes for stage in self.stages)

    def reduction(self, alone: "Result") -> tuple[float, float]:
        """How much less than one device takes the mean device and the fullest one take."""
        return 1 - self.mean / alone.fullest, 1 - self.fullest / alone.fullest


class Bench:
    """A model's specs and profiles by method, and how to run a row."""

    def __init__(self, folder: Path, shape: str) -> None:
        self._source = open_model(make_model(folder, shape))
        self._shape = shape
        names = [f"LABEL_{label}" for label in range(LABELS)]
        self._labels = {
            "id2label": dict(enumerate(names)),
            "label2id": {name: label for label, name in enumerate(names)},
        }
        self._width = SHAPES[shape]["hidden_size"]
        self._known: dict[tuple[TrainableMethod, tuple[str, ...]], tuple[ModelSpec, ModelProfile]] = {}

    def _trained(self, row: Row) -> tuple[ModelSpec, ModelProfile]:
        """The spec and the profile of a row's model; rows that train the same share them."""
        key = (row.method, row.trainable)
        if key not in self._known:
            spec = make_model_spec(
                self._source,
                auto_class="AutoModelForTokenClassification",
                config_overrides=self._labels,
                seed=0,
                method=row.method,
                lora=LoraSpec(target_modules=("query", "value")) if row.method == "lora" else None,
                trainable_patterns=row.trainable,
            )
            profile = profile_model(spec, memory_tokens=TOKENS, typical_tokens=TOKENS, name=self._shape)
            self._known[key] = spec, profile
        return self._known[key]

    def run(self, row: Row, batch_rows: int, allocator: Allocator) -> Result:
        """Plan a row for the least memory and measure each of its stages."""
        plan = self._plan(row, batch_rows, allocator)
        stages = tuple(
            StageResult(place=place, measured_bytes=self._measured(row, plan, place)) for place in plan.stages
        )
        return Result(row=row, plan=plan, stages=stages)

    def _plan(self, row: Row, batch_rows: int, allocator: Allocator) -> Plan:
        devices = tuple(
            DeviceProfile(
                worker=WorkerId(f"device-{number}"),
                name=f"device {number}",
                memory_bytes=64 * 1024 * MIB,
                base_bytes=0,
                flops_per_s=30e9,
            )
            for number in range(row.stages)
        )
        return make_plan(
            PlanRequest(
                model=self._trained(row)[1],
                cluster=ClusterProfile(devices=devices),
                batch_rows=batch_rows,
                schedule=row.schedule,
                objective="memory",
                micro_batches=row.micro_batches,
                allocator=allocator,
                allow_recompute=row.recompute is not False,
                require_recompute=row.recompute is True,
                min_stages=row.stages,
            )
        )

    def _measured(self, row: Row, plan: Plan, place: StageAssignment) -> int:
        job = StageJob(
            spec=self._trained(row)[0],
            units=(place.first_unit, place.stop_unit),
            stage=place.stage,
            in_flight=tuple(stage.in_flight for stage in plan.stages),
            schedule=plan.schedule,
            batch_rows=plan.batch_rows,
            micro_batches=plan.micro_batches,
            tokens=TOKENS,
            width=self._width,
            recompute=place.recompute,
            allocator=place.allocator,
            steps=STEPS,
        )
        done = subprocess.run(
            [sys.executable, str(PROGRAM), msgspec.json.encode(job).decode()],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        memory = msgspec.json.decode(done.stdout.splitlines()[-1], type=StageMemory)
        above_idle = memory.peak_bytes - memory.idle_bytes
        print(f"{row.name}, stage {place.stage}: {above_idle / MIB:.0f} MiB", file=sys.stderr, flush=True)
        return above_idle


def stage_rows(results: Sequence[Result]) -> list[tuple[object, ...]]:
    """Lines of a table: each stage of each result."""
    return [
        (
            f"{result.row.name}, stage {stage.place.stage}" if len(result.stages) > 1 else result.row.name,
            result.plan.micro_batches,
            f"{stage.place.first_unit}-{stage.place.stop_unit - 1}",
            stage.place.in_flight,
            "yes" if stage.place.recompute else "",
            f"{stage.predicted_bytes / MIB:.0f}",
            f"{stage.measured_bytes / MIB:.0f}",
            f"{stage.error:+.1%}",
        )
        for result in results
        for stage in result.stages
    ]


STAGE_COLUMNS = (
    "",
    "micro-\nbatches",
    "units",
    "in\nflight",
    "re-\ncomputes",
    "predicted\nMiB",
    "measured\nMiB",
    "error",
)


class Measured:
    """All results, by batch and allocator."""

    def __init__(self, bench: Bench, report: Report) -> None:
        self._bench = bench
        self._report = report
        self._baselines: dict[tuple[int, Allocator], dict[str, Result]] = {}
        self.errors: list[float] = []

    def add(self, batch_rows: int, allocator: Allocator, further: Sequence[Row]) -> None:
        """Run the pipelines and the two baselines, and further rows; show them."""
        results = {row.name: self._bench.run(row, batch_rows, allocator) for row in (SINGLE, FLUSH, STASH)}
        same = micro_batched(results[FLUSH.name].plan.micro_batches)
        results[SAME_MICRO_BATCHES] = (
            self._bench.run(same, batch_rows, allocator) if same.micro_batches != 1 else results[SINGLE.name]
        )
        self._baselines[batch_rows, allocator] = results
        distinct = list({id(result): result for result in results.values()}.values())
        shown = [*distinct, *(self._bench.run(row, batch_rows, allocator) for row in further)]
        self.errors += [stage.error for result in shown for stage in result.stages]
        self._report.table(f"{batch_rows} rows, {allocator} allocator", STAGE_COLUMNS, stage_rows(shown))

    def reductions(
        self, row: Row, batch_rows: int, allocator: Allocator, over: str = SINGLE.name
    ) -> tuple[float, float]:
        """Less memory than one device: of the mean device and of the fullest."""
        results = self._baselines[batch_rows, allocator]
        return results[row.name].reduction(results[over])

    def show_reductions(self) -> None:
        """The table behind the figures."""
        lines = [
            (
                f"{batch_rows} rows, {allocator} allocator, {row.name}",
                *(
                    f"{less:.1%}"
                    for over in (SINGLE.name, SAME_MICRO_BATCHES)
                    for less in self.reductions(row, batch_rows, allocator, over)
                ),
            )
            for batch_rows, allocator in sorted(self._baselines)
            for row in (FLUSH, STASH)
        ]
        columns = (
            "",
            "mean device",
            "fullest device",
            "mean, against the\nsame micro-batches",
            "fullest, against the\nsame micro-batches",
        )
        self._report.table("less memory than one device with the same allocator", columns, lines)


def show_figures(report: Report, measured: Measured) -> None:
    """The named figures, under the default allocator."""
    mean, fullest = measured.reductions(FLUSH, FIGURE_BATCH, "default")
    same_mean, same_fullest = measured.reductions(FLUSH, FIGURE_BATCH, "default", SAME_MICRO_BATCHES)
    stash_mean, _ = measured.reductions(STASH, FIGURE_BATCH, "default")
    report.figure("mean_reduction", mean, at_least=0.72)
    report.figure("largest_device_reduction", fullest, at_least=0.66)
    report.figure("mean_reduction_vs_microbatched", same_mean, at_least=0.58)
    report.figure("largest_reduction_vs_microbatched", same_fullest, at_least=0.50)
    report.figure("stash_mean_reduction", stash_mean, at_least=0.64)
    report.figure("worst_prediction_error", max(abs(error) for error in measured.errors), at_most=0.10)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    quick = arguments.quick
    shape = "minilm" if quick else "bert-base"
    report = Report(
        "memory",
        f"peak above the idle worker; {shape} shape with random weights, {TOKENS} tokens a row, everything trained "
        "(LoRA: rank 8 on query and value), AdamW; three stages on three equal devices, planned for the least memory "
        "on the fullest one",
        arguments,
    )
    if quick:
        report.note(
            "quick: MiniLM's shape, 8 rows, the default allocator. The targets are for "
            "BERT-base; a smaller model spends more of its memory on buffers"
        )
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Bench(Path(folder), shape), report)
        for batch_rows in (FIGURE_BATCH,) if quick else (FIGURE_BATCH, *FURTHER_BATCHES):
            for allocator in ALLOCATORS[:1] if quick else ALLOCATORS:
                further = (*(() if quick else MODES), *PARTS) if batch_rows == FIGURE_BATCH else ()
                measured.add(batch_rows, allocator, further)
    measured.show_reductions()
    show_figures(report, measured)
    return report.finish()


if __name__ == "__main__":
    sys.exit(run(parse_arguments("Peak memory of planned pipelines against one device and against the prediction.")))
