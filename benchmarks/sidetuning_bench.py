"""All variants of one data set: the device's activations once, then every variant, seed and rank."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from coterie.coordinator.job import Job
from coterie.errors import RecipeError
from sidetuning_costs import VariantRun
from sidetuning_forward import DevicePass
from sidetuning_jobs import Jobs
from sidetuning_kept import Kept
from sidetuning_local import run_local
from sidetuning_memory import MemoryJob
from sidetuning_program import ProgramRun, run_program
from sidetuning_settings import SIDE_VARIANTS, USUAL_RANK, SideSetting, Variant
from sidetuning_side import run_side
from sidetuning_wire import PADDED_TOKENS, WireCount, padded_batch, through_a_socket

MEMORY_PROGRAM = Path(__file__).with_name("sidetuning_memory.py")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is run.

    Attributes:
        keep: Folder of results; None to keep none.
        is_closed: Only what is kept is shown.
        weighs: The device's peak memory under each variant is measured.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    ranks: tuple[int, ...]
    is_quick: bool
    data: Path | None
    keep: Path | None = None
    is_closed: bool = False
    weighs: bool = True


class SetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all variants of a data set.

    Attributes:
        about: The data, in words.
        items: Test rows.
        loss_items: What is predicted of them: rows, tagged words or tokens of answers.
        row_tokens, row_selected: Mean tokens of a training row, and those that enter the loss.
        wire: A batch of the run as it is, tokens selected, over a socket.
        padded_all, padded_selected: A batch padded to 256 tokens over a socket: all its tokens, and the selected ones.
    """

    about: str
    items: int
    loss_items: int
    row_tokens: float
    row_selected: float
    wire: WireCount
    padded_all: WireCount
    padded_selected: WireCount


class LocalRuns(msgspec.Struct, frozen=True, kw_only=True):
    """What one method and seed gave on the device, or why it cannot be run."""

    runs: tuple[VariantRun, ...] = ()
    refusal: str = ""


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one data set showed; a variant that did not run is absent.

    Attributes:
        runs: At the usual rank, the seeds of each variant.
        by_rank: Mean quality at the end, by variant and rank, of the ranks that all seeds ran with.
        peak_bytes: Of the device, above an idle process.
        program: `eco` with the first seed as the program runs it, over processes.
        notes: What was left out, and why.
    """

    setting: SideSetting
    facts: SetFacts
    runs: dict[str, tuple[VariantRun, ...]]
    by_rank: dict[str, dict[int, float]]
    peak_bytes: dict[str, int]
    program: ProgramRun | None
    notes: tuple[str, ...]


def run_set(setting: SideSetting, wish: Wish, tell: Callable[[str], None]) -> SetResult | None:
    """Run everything that is wished and not kept; None if nothing may run and nothing is kept.

    Args:
        setting: The data set.
        wish: What is run.
        tell: Takes a line for each thing that is done.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _SetRuns(setting, wish, Path(scratch), tell).all()


class _SetRuns:
    """Runs one data set; the device's pass and the jobs are made when something needs them."""

    def __init__(self, setting: SideSetting, wish: Wish, folder: Path, tell: Callable[[str], None]) -> None:
        self._setting = setting
        self._wish = wish
        self._folder = folder
        self._tell = tell
        self._kept = Kept(wish.keep, setting, is_closed=wish.is_closed)
        self._frozen_jobs: dict[int, Job] = {}
        self._side_done: dict[tuple[Variant, int, int], VariantRun | None] = {}
        self._notes: list[str] = []

    def all(self) -> SetResult | None:
        """Everything, in the order in which results are wanted first."""
        wish, facts = self._wish, self._kept.get(SetFacts, "facts", self._facts)
        if facts is None:
            return None
        runs = self._side_runs(USUAL_RANK if USUAL_RANK in wish.ranks else wish.ranks[0])
        program = None
        if "eco" in wish.variants:
            seed = wish.seeds[0]
            program = self._kept.get(ProgramRun, f"program {seed}", lambda: run_program(self._jobs, seed))
        for method in ("bitfit", "lora"):
            for run in self._local_runs(method):
                runs[run.variant] = (*runs.get(run.variant, ()), run)
        peaks = self._peaks(runs) if wish.weighs else {}
        by_rank = self._by_rank()
        if "mobillm" in wish.variants and "neither" in runs:
            runs["mobillm"] = runs["neither"]
            peaks |= {"mobillm": peaks["neither"]} if "neither" in peaks else {}
        return SetResult(
            setting=self._setting,
            facts=facts,
            runs={variant: runs[variant] for variant in wish.variants if variant in runs},
            by_rank=by_rank,
            peak_bytes=peaks,
            program=program,
            notes=tuple(self._notes),
        )

    @cached_property
    def _jobs(self) -> Jobs:
        return Jobs(self._setting, self._folder, self._wish.data)

    @cached_property
    def _device(self) -> DevicePass:
        device = DevicePass(self._frozen(self._wish.seeds[0]), self._folder)
        self._tell(f"{self._setting.name}: the device's pass took {device.cpu_s:.0f} CPU s")
        return device

    def _frozen(self, seed: int) -> Job:
        if seed not in self._frozen_jobs:
            self._frozen_jobs[seed] = self._jobs.frozen(seed)
        return self._frozen_jobs[seed]

    def _facts(self) -> SetFacts:
        job, device, batch_rows = self._frozen(self._wish.seeds[0]), self._device, self._setting.batch_rows
        selected = [job.task.count_loss_tokens(row.labels) for row in job.splits["train"].rows]
        mean = float(np.mean(selected))
        taps = device.train.get(0, all_tokens=False)
        test = job.splits["test"].rows
        return SetFacts(
            about=self._jobs.slices.about,
            items=len(test),
            loss_items=sum(job.task.count_loss_tokens(row.labels) for row in test),
            row_tokens=float(job.splits["train"].lengths.mean()),
            row_selected=mean,
            wire=through_a_socket(taps.repeat(batch_rows, 1, 1), "float16"),
            padded_all=padded_batch(batch_rows, PADDED_TOKENS, device.blocks, device.width),
            padded_selected=padded_batch(batch_rows, round(mean), device.blocks, device.width),
        )

    def _wanted(self) -> list[Variant]:
        variants = self._wish.variants
        return [v for v in SIDE_VARIANTS if v in variants or (v == "neither" and "mobillm" in variants)]

    def _side_runs(self, rank: int) -> dict[str, tuple[VariantRun, ...]]:
        """Side-tuning at one rank; a variant has the seeds that are there."""
        runs: dict[str, tuple[VariantRun, ...]] = {}
        for variant in self._wanted():
            found = [self._side_run(variant, seed, rank) for seed in self._wish.seeds]
            there = tuple(run for run in found if run is not None)
            if there:
                runs[variant] = there
        return runs

    def _side_run(self, variant: Variant, seed: int, rank: int) -> VariantRun | None:
        def run() -> VariantRun:
            writes = self._setting.task == "summarization" and variant in {"eco", "neither"} and rank == USUAL_RANK
            texts = None
            if writes and seed == self._wish.seeds[0]:
                texts = (self._jobs.slices.test, self._jobs.folder / f"{variant}-{rank}")
            found = run_side(variant, self._frozen(seed), self._device, self._setting, rank=rank, texts=texts)
            self._tell(f"{self._setting.name}: {variant}, rank {rank}, seed {seed} is done")
            return found

        if (variant, seed, rank) not in self._side_done:
            self._side_done[variant, seed, rank] = self._kept.get(VariantRun, f"{variant} rank {rank} seed {seed}", run)
        return self._side_done[variant, seed, rank]

    def _by_rank(self) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = {}
        for rank in self._wish.ranks:
            for variant, runs in self._side_runs(rank).items():
                if len(runs) == len(self._wish.seeds):
                    mean = sum(run.curve[-1].points for run in runs) / len(runs)
                    found.setdefault(variant, {})[rank] = mean
        return found

    def _local_runs(self, method: str) -> list[VariantRun]:
        wanted = [variant for variant in self._wish.variants if variant.startswith(method)]
        found: list[VariantRun] = []
        if not wanted:
            return found
        for seed in self._wish.seeds[: self._setting.local_seeds]:
            done = self._kept.get(LocalRuns, f"{method} seed {seed}", lambda seed=seed: self._local(method, seed))
            if done is not None and done.refusal:
                self._notes.append(f"{', '.join(wanted)} left out: {done.refusal}")
            found += [run for run in (done.runs if done else ()) if run.variant in wanted]
        return found

    def _local(self, method: str, seed: int) -> LocalRuns:
        try:
            job = self._jobs.trained("bitfit" if method == "bitfit" else "lora", seed)
        except RecipeError as error:
            return LocalRuns(refusal=error.message)
        runs = run_local(job, self._setting, seed=seed)
        self._tell(f"{self._setting.name}: {method}, seed {seed} is done")
        return LocalRuns(runs=tuple(runs))

    def _peaks(self, runs: dict[str, tuple[VariantRun, ...]]) -> dict[str, int]:
        found = {}
        for variant in runs:
            peak = self._kept.get(int, f"peak {variant}", lambda variant=variant: self._peak_bytes(variant))
            if peak is not None:
                found[variant] = peak
        return found

    def _peak_bytes(self, variant: str) -> int:
        memory_job = {
            "name": self._setting.name,
            "variant": variant,
            "is_quick": self._wish.is_quick,
            "data": str(self._wish.data) if self._wish.data else None,
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
