"""All variants of one data set: the device's activations once, then every variant, seed and rank."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from coterie.coordinator.job import Job
from coterie.errors import RecipeError
from sidetuning_costs import VariantRun
from sidetuning_forward import DevicePass
from sidetuning_jobs import Jobs
from sidetuning_local import run_local
from sidetuning_memory import MemoryJob
from sidetuning_program import ProgramRun, run_program
from sidetuning_settings import SIDE_VARIANTS, USUAL_RANK, SideSetting, Variant
from sidetuning_side import run_side
from sidetuning_wire import PADDED_TOKENS, WireCount, padded_batch, through_a_socket

MEMORY_PROGRAM = Path(__file__).with_name("sidetuning_memory.py")

ByVariant = Mapping[str, Sequence[VariantRun]]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is run."""

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    ranks: tuple[int, ...]
    is_quick: bool
    data: Path | None


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one data set showed.

    Attributes:
        about: The data, in words.
        items: Test rows.
        runs: At the usual rank, the seeds of each variant.
        by_rank: Mean quality at the end, by variant and rank.
        peak_bytes: Of the device, above an idle process.
        row_tokens, row_selected: Mean tokens of a training row, and those that enter the loss.
        wire: A batch of the run as it is, tokens selected, over a socket.
        padded_all, padded_selected: A batch padded to 256 tokens over a socket: all its tokens, and the selected ones.
        program: `eco` with the first seed as the program runs it, over processes; None if `eco` was not asked for.
        notes: What was left out, and why.
    """

    setting: SideSetting
    about: str
    items: int
    runs: dict[str, tuple[VariantRun, ...]]
    by_rank: dict[str, dict[int, float]]
    peak_bytes: dict[str, int]
    row_tokens: float
    row_selected: float
    wire: WireCount
    padded_all: WireCount
    padded_selected: WireCount
    program: ProgramRun | None
    notes: tuple[str, ...]


def run_set(setting: SideSetting, wish: Wish, tell: Callable[[str], None]) -> SetResult:
    """Run everything that is wished; `tell` takes a line for each thing that is done."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        jobs = Jobs(setting, folder, wish.data)
        frozen = {seed: jobs.frozen(seed) for seed in wish.seeds}
        first = frozen[wish.seeds[0]]
        device = DevicePass(first, folder)
        tell(f"{setting.name}: the device's pass took {device.cpu_s:.0f} CPU s")
        runs, by_rank = _side_runs(jobs, wish, frozen, device, tell)
        notes: list[str] = []
        for method in ("bitfit", "lora"):
            for run in _local_runs(jobs, wish, method, notes, tell):
                runs[run.variant] = (*runs.get(run.variant, ()), run)
        peaks = {} if wish.is_quick else {variant: _peak_bytes(setting, wish, variant) for variant in runs}
        if "mobillm" in wish.variants and "neither" in runs:
            runs["mobillm"] = runs["neither"]
            peaks |= {"mobillm": peaks["neither"]} if peaks else {}
        program = run_program(jobs, wish.seeds[0]) if "eco" in wish.variants else None
        taps = device.train.get(0, all_tokens=False)
        selected = round(_selected(first))
        return SetResult(
            setting=setting,
            about=jobs.slices.about,
            items=len(first.splits["test"].rows),
            runs={variant: runs[variant] for variant in wish.variants if variant in runs},
            by_rank=by_rank,
            peak_bytes=peaks,
            row_tokens=float(first.splits["train"].lengths.mean()),
            row_selected=_selected(first),
            wire=through_a_socket(taps.repeat(setting.batch_rows, 1, 1), "float16"),
            padded_all=padded_batch(setting.batch_rows, PADDED_TOKENS, device.blocks, device.width),
            padded_selected=padded_batch(setting.batch_rows, selected, device.blocks, device.width),
            program=program,
            notes=tuple(notes),
        )


def _side_runs(
    jobs: Jobs, wish: Wish, frozen: Mapping[int, Job], device: DevicePass, tell: Callable[[str], None]
) -> tuple[dict[str, tuple[VariantRun, ...]], dict[str, dict[int, float]]]:
    wanted = [v for v in SIDE_VARIANTS if v in wish.variants or (v == "neither" and "mobillm" in wish.variants)]
    runs: dict[str, tuple[VariantRun, ...]] = {}
    by_rank: dict[str, dict[int, float]] = {}
    setting = jobs.setting
    for variant in wanted:
        for rank in wish.ranks:
            found = []
            for seed, job in frozen.items():
                is_read = setting.task == "summarization" and seed == wish.seeds[0]
                texts = (jobs.slices.test, jobs.folder / f"{variant}-{rank}") if is_read else None
                found.append(run_side(variant, job, device, setting, rank=rank, texts=texts))
            by_rank.setdefault(variant, {})[rank] = sum(run.curve[-1].points for run in found) / len(found)
            if rank == USUAL_RANK or len(wish.ranks) == 1:
                runs[variant] = tuple(found)
        tell(f"{setting.name}: {variant} is done")
    return runs, by_rank


def _local_runs(jobs: Jobs, wish: Wish, method: str, notes: list[str], tell: Callable[[str], None]) -> list[VariantRun]:
    wanted = [variant for variant in wish.variants if variant.startswith(method)]
    found: list[VariantRun] = []
    if not wanted:
        return found
    setting = jobs.setting
    for seed in wish.seeds[: setting.local_seeds]:
        try:
            job = jobs.trained("bitfit" if method == "bitfit" else "lora", seed)
        except RecipeError as error:
            notes.append(f"{', '.join(wanted)} left out: {error.message}")
            return found
        found += [run for run in run_local(job, setting, seed=seed) if run.variant in wanted]
    tell(f"{setting.name}: {method} is done")
    return found


def _selected(job: Job) -> float:
    rows = job.splits["train"].rows
    return float(np.mean([job.task.count_loss_tokens(row.labels) for row in rows]))


def _peak_bytes(setting: SideSetting, wish: Wish, variant: str) -> int:
    memory_job = {
        "name": setting.name,
        "variant": variant,
        "is_quick": wish.is_quick,
        "data": str(wish.data) if wish.data else None,
    }
    job = msgspec.convert(memory_job, MemoryJob)
    done = subprocess.run(
        [sys.executable, str(MEMORY_PROGRAM), msgspec.json.encode(job).decode()],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )
    return int(done.stdout.splitlines()[-1])
