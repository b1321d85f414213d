"""One layer on several compute backends: against torch alone, against the ideal, with slowed backends, in whole steps.

torch has one thread, PoCL one compute unit, NumPy one thread: three backends for two cores, of which the scheduler
leaves one out (the paper's Figures 2 and 6); "other" is the one that it takes beside torch. Everything that is compared
alternates within one run. The ideal is `1/(1/t1 + 1/t2)` of the times that the two backends take with nothing beside
them; "of both beside" is the same of the times that they take while the other computes a layer of its own: all that two
cores of this machine give at that moment; "torch on two threads" is one backend on both of them. Attention is timed
with its projections and residual, without the norm after it, which belongs to the layer. Layers are timed by
the clock, on two free cores: rounds in which somebody else took one do not count, as long as enough are left. Whole
steps run on emulated devices, which count CPU seconds: a device's own, and those of the slowest of its backends where
several work at once.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("POCL_MAX_PTHREAD_COUNT", "1")

from heads_layers import FREE, LEAST_FREE, SHAPES, LayerBench, Timed
from heads_steps import VARIANTS, StepBench
from reporting import Report, parse_arguments

SLOWED = (1, 2, 4, 10)
ROWS, TOKENS = 8, 128


def layers(report: Report, rounds: int, budget_s: float) -> dict[str, dict[str, Timed]]:
    """Attention alone and whole layers of both shapes."""
    found: dict[str, dict[str, Timed]] = {}
    for shape in SHAPES:
        with LayerBench(shape, ROWS, TOKENS, budget_s) as bench:
            found[shape] = {part: bench.compare(part, rounds) for part in ("attention", "layer")}
            report.note(f"{shape}: {bench.allocation_in_words}")
            slower = [one.torch_beside_s / one.torch_s for one in found[shape].values()]
            report.note(
                f"{shape}: torch alone takes {max(slower):.2f} times as long while the other computes beside it"
            )
            low, middle, high = statistics.quantiles(bench.scalings, n=4)
            report.note(
                f"between the rounds of {shape} two plain matrix loops at once did {middle:.2f} times the work of one "
                f"(quartiles {low:.2f} and {high:.2f}; 2 on a machine that is free); {bench.free_rounds} of "
                f"{bench.rounds} rounds had at least {FREE} before and after them, and count, or all if fewer than "
                f"{LEAST_FREE} for a row"
            )
    rows = [
        (
            f"{shape}, {part}",
            timed.torch_s * 1e3,
            timed.other_s * 1e3,
            timed.split_s * 1e3,
            timed.two_threads_s * 1e3,
            timed.torch_s / timed.split_s,
            timed.ideal_s / timed.split_s,
            timed.beside_s / timed.split_s,
        )
        for shape, parts in found.items()
        for part, timed in parts.items()
    ]
    columns = (
        "",
        "torch alone ms",
        "other alone ms",
        "shared ms",
        "torch on two threads ms",
        "times torch alone",
        "share of ideal",
        "of both beside",
    )
    report.table(f"forward and backward, {ROWS} rows of {TOKENS} tokens", columns, rows)
    return found


def slowed(report: Report, rounds: int, budget_s: float) -> dict[tuple[str, int], float]:
    """Shared over the best single backend, with OpenCL made slower; NumPy is as fast as ever."""
    found: dict[tuple[str, int], float] = {}
    rows = []
    for shape in SHAPES:
        for factor in SLOWED:
            with LayerBench(shape, ROWS, TOKENS, budget_s, slow_down=factor) as bench:
                seconds = bench.compare_with_each(rounds)
                shared_s = seconds["shared"]
                found[shape, factor] = shared_s / min(s for name, s in seconds.items() if name != "shared")
                rows.append((f"{shape}, {factor}x", *(s * 1e3 for s in seconds.values()), found[shape, factor]))
    columns = ("OpenCL slowed", "torch alone ms", "OpenCL ms", "NumPy ms", "shared ms", "over the best single")
    report.table("whole layers with a slowed backend", columns, rows)
    return found


def steps(report: Report, folder: Path, batches: tuple[int, ...], rounds: int) -> StepBench:
    """One device and three, with and without the scheduler."""
    bench = StepBench(folder)
    for _ in range(rounds):
        for batch in batches:
            for variant in VARIANTS:
                bench.run(variant, batch)
    rows = [
        (batch, *(bench.seconds(variant, batch) for variant in VARIANTS), bench.scheduler(batch), bench.product(batch))
        for batch in batches
    ]
    columns = ("batch", *(f"{variant} s" for variant in VARIANTS), "scheduler alone", "both over product")
    report.table("seconds per step, MiniLM shape, emulated devices of a quarter of a core's speed", columns, rows)
    chosen = "; ".join(
        f"batch {batch}: {bench.micro_batches['Pipeline', batch]} and {bench.micro_batches['Pipeline-MBS', batch]}"
        for batch in batches
    )
    report.note(f"micro-batches that the planner chose for Pipeline and Pipeline-MBS: {chosen}")
    return bench


def plot(file: Path, found: dict[str, dict[str, Timed]], sweep: dict[tuple[str, int], float], bench: StepBench) -> None:
    """All three as one PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    names = [f"{shape}\n{part}" for shape, parts in found.items() for part in parts]
    timed = [one for parts in found.values() for one in parts.values()]
    width = 0.2
    for offset, (label, seconds) in enumerate(
        {
            "torch alone": [one.torch_s for one in timed],
            "other alone": [one.other_s for one in timed],
            "shared": [one.split_s for one in timed],
            "ideal": [one.ideal_s for one in timed],
        }.items()
    ):
        left.bar([n + width * offset for n in range(len(names))], [s * 1e3 for s in seconds], width, label=label)
    left.set_xticks([n + 1.5 * width for n in range(len(names))], names)
    left.set_ylabel("ms")
    left.legend()
    for shape in SHAPES:
        middle.plot(SLOWED, [sweep[shape, factor] for factor in SLOWED], marker="o", label=shape)
    middle.axhline(1.05, linestyle=":", color="grey")
    middle.set_xlabel("OpenCL slowed, times")
    middle.set_ylabel("shared over the best single backend")
    middle.legend()
    for variant in VARIANTS:
        right.plot(bench.batches, [bench.seconds(variant, batch) for batch in bench.batches], marker="o", label=variant)
    right.set_xlabel("rows of a step")
    right.set_ylabel("seconds per step")
    right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    arguments = parse_arguments(
        "Layers shared among compute backends against single backends, and whole training steps with and without.",
        values=(("--plot", "FILE", "draw everything as a PNG"), ("--only", "PART", "layers, slowed or steps")),
    )
    rounds, batches, budget_s = (3, (4,), 2.0) if arguments.quick else (15, (1, 2, 4, 8, 16), 20.0)
    report = Report(
        "heads",
        f"layers: random weights, {ROWS} rows of {TOKENS} tokens, dropout off, gradients of x and all weights, weights "
        "sent anew each time, medians of alternating rounds; torch one thread, PoCL one compute unit, numpy present",
        arguments,
    )
    wanted = {arguments.only} if arguments.only else {"layers", "slowed", "steps"}
    found, sweep, bench = {}, {}, None
    if "layers" in wanted:
        found = layers(report, rounds, budget_s)
        attention = {shape: parts["attention"] for shape, parts in found.items()}
        speedups = {shape: one.torch_s / one.split_s for shape, one in attention.items()}
        whole = [parts["layer"].torch_s / parts["layer"].split_s for parts in found.values()]
        ideal = [one.ideal_s / one.split_s for parts in found.values() for one in parts.values()]
        report.figure("attention_speedup", min(speedups.values()), at_least=1.6)
        report.figure("attention_speedup_bert", speedups["bert-base"], at_least=1.75)
        report.figure("layer_speedup", min(whole), at_least=1.55)
        report.figure("share_of_ideal", min(ideal), at_least=0.85)
        beside = [one.beside_s / one.split_s for parts in found.values() for one in parts.values()]
        report.figure("share_of_both_beside", min(beside), at_least=0.85)
        two_threads = [one.two_threads_s / one.split_s for parts in found.values() for one in parts.values()]
        report.figure("share_of_two_threads", min(two_threads))
    if "slowed" in wanted:
        sweep = slowed(report, rounds, budget_s)
        report.figure("worst_over_best_single", max(sweep.values()), at_most=1.05)
    if "steps" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            bench = steps(report, Path(folder), batches, 1 if arguments.quick else 2)
        report.figure("step_speedup", min(bench.scheduler(batch) for batch in batches), at_least=1.3)
        report.figure("pipeline_with_scheduler_over_product", min(map(bench.product, batches)), at_least=0.85)
    if arguments.plot and found and sweep and bench is not None:
        plot(Path(arguments.plot), found, sweep, bench)
        report.note(f"plot: {arguments.plot}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
