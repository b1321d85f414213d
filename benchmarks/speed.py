"""Seconds per step: coterie against a plain PyTorch loop, torch's own 1F1B, equal cuts and the fastest device alone.

All runs of a group alternate; figures are ratios of medians. Embeddings are frozen in every row, 8 rows in 4
micro-batches, one thread a worker. coterie runs as its users run it: a coordinator and worker processes that joined by
TLS, their stages linked by Unix sockets. Emulated devices sleep so that their speeds add up to one core.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from coterie import api
from coterie.config.loading import load_recipe
from coterie.config.recipe import LocalWorker
from coterie.metrics.events import read_events, valid_steps
from coterie.planner.plan import Plan
from made_up import make_data, make_model
from reporting import Report, parse_arguments

RIVALS = Path(__file__).with_name("speed_rivals.py")
UNEQUAL = {"fast": 1 / 1.75, "half": 0.5 / 1.75, "quarter": 0.25 / 1.75}
"""1 : 0.5 : 0.25, added up to one core."""


class Bench:
    """Runs things in a scratch folder and remembers seconds per step by row; `steps` count of each run."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self._folder = folder
        self.steps = steps
        self._runs = 0
        self.seconds: dict[str, list[float]] = {}
        self.plans: dict[str, Plan] = {}
        self.models = {shape: make_model(folder / shape, shape) for shape in ("minilm", "bert-base")}

    def rate(self, row: str, *, over: str) -> float:
        """How many times as fast a row is as another."""
        return statistics.median(self.seconds[over]) / statistics.median(self.seconds[row])

    def rival(self, row: str, kind: str, shape: str, method: str, tokens: int) -> None:
        job = {"kind": kind, "model": str(self.models[shape]), "method": method, "tokens": tokens, "steps": self.steps}
        done = subprocess.run(
            [sys.executable, str(RIVALS), json.dumps(job)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )
        self.seconds.setdefault(row, []).extend(json.loads(done.stdout.splitlines()[-1]))

    def ours(
        self,
        row: str,
        shape: str,
        method: str,
        tokens: int,
        workers: Sequence[LocalWorker],
        **options: object,
    ) -> None:
        """One run of `steps` steps and three that do not count: `stash` fills in the first two, drains in the last."""
        self._runs += 1
        data = make_data(self._folder / f"{tokens}.jsonl", rows=8 * (self.steps + 3), tokens=tokens)
        freeze = {"freeze": ("embeddings",)} if method == "full" else {"lora_targets": ("query", "value")}
        folder = self._folder / f"run-{self._runs}"
        recipe = load_recipe(
            None,
            {
                "model.name": str(self.models[shape]),
                "data.train": str(data),
                "method": method,
                "epochs": 1,
                "batch_rows": 8,
                "micro_batches": 4,
                "recompute": "off",
                "max_grad_norm": 0.0,  # the rivals do not clip either
                "allocator": "default",
                "local_workers": tuple(workers),
                "output": str(folder),
                **freeze,
                **options,
            },
        )
        result = api.train(recipe, api.QuietObserver())
        self.plans[row] = result.plan
        steps = [record.seconds for record in valid_steps(read_events(folder / api.EVENTS))]
        self.seconds.setdefault(row, []).extend(steps[2:-1])


def two_cores(bench: Bench, rounds: int, tokens: int) -> None:
    """MiniLM shape: one worker, and two stages on two cores."""
    one = (LocalWorker(name="one"),)
    two = (LocalWorker(name="a"), LocalWorker(name="b"))
    halves: dict[str, object] = {"cuts": (4,)}
    for _ in range(rounds):
        for _ in range(2):  # the two that are nearest to each other, and so want the most steps
            bench.rival("plain loop, full", "plain", "minilm", "full", tokens)
            bench.ours("one worker, full", "minilm", "full", tokens, one)
        bench.rival("torch 1F1B, full", "torch-1f1b", "minilm", "full", tokens)
        bench.ours("flush, full", "minilm", "full", tokens, two, **halves)
        bench.rival("plain loop, lora", "plain", "minilm", "lora", tokens)
        bench.rival("torch 1F1B, lora", "torch-1f1b", "minilm", "lora", tokens)
        bench.ours("stash, lora", "minilm", "lora", tokens, two, schedule="stash", **halves)


def emulated(bench: Bench, tokens: int) -> None:
    """BERT-base shape on emulated devices that add up to one core: CPU seconds decide, so few steps are enough."""
    bench.steps = min(bench.steps, 3)
    unequal = tuple(LocalWorker(name=name, speed=round(speed, 4)) for name, speed in UNEQUAL.items())
    thirds = tuple(LocalWorker(name=name, speed=0.3333) for name in ("x", "y", "z"))
    bench.ours("unequal: fastest alone", "bert-base", "full", tokens, unequal[:1], schedule="stash")
    bench.ours("unequal: equal split", "bert-base", "full", tokens, unequal, schedule="stash", cuts=(5, 9))
    bench.ours("unequal: plan", "bert-base", "full", tokens, unequal, schedule="stash")
    bench.ours("equal: one alone", "bert-base", "full", tokens, thirds[:1], schedule="flush")
    bench.ours("equal: three, flush", "bert-base", "full", tokens, thirds, schedule="flush", cuts=(5, 9))
    bench.ours("equal: three, stash", "bert-base", "full", tokens, thirds, schedule="stash", cuts=(5, 9))


def show(report: Report, bench: Bench, title: str, rows: Sequence[str], base: str) -> None:
    table = []
    for row in rows:
        seconds = bench.seconds[row]
        cuts = "-".join(str(s.stop_unit - s.first_unit) for s in bench.plans[row].stages) if row in bench.plans else ""
        table.append((row, cuts, statistics.median(seconds), min(seconds), len(seconds), bench.rate(row, over=base)))
    report.table(title, ("", "units per stage", "median s", "best s", "steps", f"times {base}"), table)


def main() -> int:
    arguments = parse_arguments("Seconds per step against plain PyTorch, torch's 1F1B, equal cuts, one device.")
    # An update costs the same however few tokens a batch has: rows too short would measure AdamW, not the pipeline.
    rounds, steps, tokens, short = (1, 2, 64, 16) if arguments.quick else (3, 5, 128, 64)
    report = Report(
        "speed",
        f"random weights; MiniLM shape with {tokens} tokens a row on two cores, BERT-base shape with {short} tokens on "
        "emulated devices; embeddings frozen, 8 rows in 4 micro-batches, AdamW, no clipping, one thread a worker",
        arguments,
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), steps=steps)
        two_cores(bench, rounds, tokens)
        emulated(bench, short)
    two = ("plain loop, full", "one worker, full", "torch 1F1B, full", "flush, full")
    show(report, bench, "two cores, full fine-tuning", two, "plain loop, full")
    show(report, bench, "two cores, LoRA", ("plain loop, lora", "torch 1F1B, lora", "stash, lora"), "plain loop, lora")
    unequal = ("unequal: fastest alone", "unequal: equal split", "unequal: plan")
    show(report, bench, "devices 1 : 0.5 : 0.25", unequal, "unequal: fastest alone")
    equal = ("equal: one alone", "equal: three, flush", "equal: three, stash")
    show(report, bench, "three equal devices", equal, "equal: one alone")
    rate = bench.rate
    report.figure("single_over_plain_loop", 1 / rate("one worker, full", over="plain loop, full"), at_most=1.03)
    report.figure("flush_over_torch_1f1b", rate("flush, full", over="torch 1F1B, full"), at_least=0.97)
    report.figure("stash_lora_over_one_thread", rate("stash, lora", over="plain loop, lora"), at_least=1.8)
    report.figure("stash_lora_over_torch_1f1b", rate("stash, lora", over="torch 1F1B, lora"), at_least=1.15)
    report.figure("unequal_plan_over_equal_split", rate("unequal: plan", over="unequal: equal split"), at_least=1.8)
    report.figure("unequal_plan_over_fastest_alone", rate("unequal: plan", over="unequal: fastest alone"), at_least=1.3)
    report.figure("three_equal_stash", rate("equal: three, stash", over="equal: one alone"), at_least=2.35)
    report.figure("three_equal_flush", rate("equal: three, flush", over="equal: one alone"), at_least=1.9)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
