"""Every task on real data against a plain transformers or PEFT loop: the same losses, the same quality.

Same losses: dropout off on both sides, the plain loop takes row order and starting values of new layers and adapters
from coterie; the losses of each step are compared. Same quality: dropout on, each side shuffles and starts for itself
(coterie puts rows of similar length together, as it does by default), several seeds; the mean over seeds is compared
on at least 1,000 items, which are words, rows or, for causal models, tokens of given answers. Answers of causal models
are not generated: a thousand of them would take hours of one core. coterie runs over three local workers.

Figures: tasks (compared), worst_loss_difference (relative, over all steps of all tasks), worst_quality_gap_points (mean
of coterie against mean of the plain loop), worst_gap_over_allowed (of what is allowed: half a point or, if it is
larger, the difference between seeds of one side). Takes about an hour of two cores (the two causal tasks 14 and 15
minutes of it). The quick run trains each task once, a few steps without dropout, and compares both losses and quality
of that.

The data folder has a folder for each data set: banking77, banking77_pairs, self_instruct, mts_dialog, each with a
JSON Lines file per split. Named entities ship with coterie. Tasks whose data or model is missing are named.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from reporting import Report, parse_arguments
from task_runs import Bench, Comparison, Quality
from task_settings import SETTINGS, Setting, Sizes
from task_slices import ENVIRONMENT

ALLOWED_POINTS = 0.5
COMPARED_STEPS, QUICK_STEPS = 30, 4
SEEDS = (0, 1, 2)


def quick(setting: Setting) -> Setting:
    """A look at whether everything runs: nothing is learnt in so few steps."""
    rows = setting.batch_rows * QUICK_STEPS
    test = 8 if setting.decoder else 64
    return msgspec.structs.replace(setting, sizes=Sizes(train=rows, test=test), steps=QUICK_STEPS)


def show_losses(report: Report, found: Sequence[Comparison]) -> None:
    rows = []
    for task in found:
        sides = (task.our_losses, task.plain_losses)
        losses = [f"{side[index]:.6f}" for index in (0, -1) for side in sides]
        rows.append((task.setting.name, len(task.our_losses), *losses, f"{task.loss_difference:.1e}"))
    columns = ("", "steps", "first: coterie", "plain loop", "last: coterie", "plain loop", "largest difference")
    report.table("losses, dropout off, same order", columns, rows)


def show_quality(report: Report, task: Comparison) -> None:
    """Each seed on both sides."""
    rows = [("untrained", "", "", *_cells(task, task.untrained))]
    for seed, (ours, plain) in enumerate(zip(task.ours, task.plain, strict=True)):
        rows.append((f"run {seed + 1}", *_cells(task, ours), *_cells(task, plain)))
    names = (*task.setting.figures, "loss")
    columns = ("", *(f"coterie {name}" for name in names), *(f"plain {name}" for name in names))
    report.table(f"{task.setting.name}: {task.about}; {task.items} items", columns, rows)


def _cells(task: Comparison, quality: Quality) -> tuple[str, ...]:
    return (*(f"{quality.points[name]:.2f}" for name in task.setting.figures), f"{quality.loss:.4f}")


def show_gaps(report: Report, found: Sequence[Comparison]) -> None:
    rows = [
        (
            task.setting.name,
            task.setting.figures[0],
            task.items,
            f"{task.mean(task.ours):.2f}",
            f"{task.mean(task.plain):.2f}",
            f"{task.gap:+.2f}",
            f"{allowed(task):.2f}",
        )
        for task in found
    ]
    columns = ("", "figure", "items", "coterie, mean", "plain loop, mean", "gap", "allowed")
    report.table("quality in points", columns, rows)


def allowed(task: Comparison) -> float:
    """Points by which the means may differ."""
    return max(ALLOWED_POINTS, task.spread)


def main() -> int:
    data = ("--data", "FOLDER", f"a folder per data set (default: {ENVIRONMENT}, else what ships with coterie)")
    only = ("--only", "TASK", "compare this task alone")
    arguments = parse_arguments("Every task against a plain transformers or PEFT loop.", values=(data, only))
    steps, seeds = (QUICK_STEPS, ()) if arguments.quick else (COMPARED_STEPS, SEEDS)
    report = Report(
        "tasks",
        "MiniLM, all of it trained, and SmolLM2-135M with LoRA, over three local workers, against one process that "
        f"runs the whole model; losses of {steps} steps with dropout off, quality "
        + (f"of {len(seeds)} seeds with dropout on" if seeds else "after the same steps"),
        arguments,
    )
    folder = arguments.data or os.environ.get(ENVIRONMENT)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), Path(folder) if folder else None, compared_steps=steps)
        for setting in SETTINGS:
            reason = bench.left_out(setting)
            if arguments.only not in {None, setting.name}:
                reason = "not asked for"
            if reason is not None:
                report.note(f"left out: {setting.name}: {reason}")
                continue
            found.append(bench.compare(quick(setting) if arguments.quick else setting, seeds))
            show_quality(report, found[-1])
            report.note(f"losses of {steps} steps differ by at most {found[-1].loss_difference:.1e}")
    show_losses(report, found)
    show_gaps(report, found)
    report.figure("tasks", len(found), at_least=1 if arguments.only else len(SETTINGS))
    if found:
        report.figure("worst_loss_difference", max(task.loss_difference for task in found), at_most=1e-4)
        report.figure("worst_quality_gap_points", max(abs(task.gap) for task in found), unit="points")
        report.figure("worst_gap_over_allowed", max(abs(task.gap) / allowed(task) for task in found), at_most=1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
