"""What weight staleness costs: `stash` against `flush` on a real data set, loss and entity F1 per epoch, seeds apart.

Figures: f1_gap_points (mean F1 of `flush` minus that of `stash` after the last epoch, in points), loss_gap (mean dev
loss of `stash` minus that of `flush`), seed_spread_points (largest difference of F1 between seeds of one schedule).
"""

import statistics
import sys
import tempfile
from pathlib import Path

from coterie import api
from coterie.cli.demo import demo_model
from coterie.config.loading import load_recipe
from coterie.config.recipe import LocalWorker
from coterie.metrics.events import read_events, valid_evaluations
from coterie.metrics.records import EvaluationRecord
from coterie.tasks.samples import sample_path
from reporting import Report, parse_arguments

SCHEDULES = ("flush", "stash")


def run(schedule: str, seed: int, folder: Path, *, epochs: int, steps: int | None) -> tuple[EvaluationRecord, ...]:
    """One fine-tune over three workers, two blocks each; the evaluations on `dev`, one per epoch."""
    data = sample_path("wikigold")
    recipe = load_recipe(
        None,
        {
            "model.name": str(demo_model()),
            "data.train": str(data / "train.conll"),
            "data.dev": str(data / "dev.conll"),
            "epochs": epochs,
            "max_steps": steps,
            "batch_rows": 8,
            "micro_batches": 4,
            # `stash` updates once per micro-batch: four times as often, with a quarter of the rows.
            "learning_rate": 2e-4 if schedule == "flush" else 1e-4,
            "warmup_ratio": 0.1,
            "schedule": schedule,
            "seed": seed,
            "freeze": ("embeddings",),
            "cuts": (3, 5),
            "local_workers": tuple(LocalWorker(name=name) for name in ("a", "b", "c")),
            "output": str(folder),
        },
    )
    api.train(recipe, api.QuietObserver())
    return valid_evaluations(read_events(folder / api.EVENTS))


def main() -> int:
    arguments = parse_arguments("Loss and F1 per epoch of stash against flush on wikigold with MiniLM.")
    epochs, seeds, steps = (1, (0,), 20) if arguments.quick else (2, (0, 1), None)
    report = Report(
        "staleness",
        "MiniLM on wikigold (named entities), embeddings frozen, three workers on one machine, 8 rows in 4 "
        "micro-batches; learning rate 2e-4 for flush, 1e-4 for stash, which updates four times as often",
        arguments,
    )
    results: dict[str, list[tuple[EvaluationRecord, ...]]] = {schedule: [] for schedule in SCHEDULES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for schedule in SCHEDULES:
                path = Path(folder) / f"{schedule}-{seed}"
                results[schedule].append(run(schedule, seed, path, epochs=epochs, steps=steps))
    rows = []
    for epoch in range(epochs):
        for index, seed in enumerate(seeds):
            row: list[object] = [f"epoch {epoch + 1}, seed {seed}"]
            for schedule in SCHEDULES:
                record = results[schedule][index][epoch]
                row += [f"{record.loss:.4f}", f"{record.main_value:.1%}"]
            rows.append(row)
    report.table("dev loss and entity F1", ("", "flush loss", "flush F1", "stash loss", "stash F1"), rows)
    last = {schedule: [records[-1] for records in results[schedule]] for schedule in SCHEDULES}
    f1 = {schedule: [100 * record.main_value for record in last[schedule]] for schedule in SCHEDULES}
    loss = {schedule: statistics.fmean(record.loss or 0.0 for record in last[schedule]) for schedule in SCHEDULES}
    report.figure("f1_gap_points", statistics.fmean(f1["flush"]) - statistics.fmean(f1["stash"]), unit="points")
    report.figure("loss_gap", loss["stash"] - loss["flush"])
    report.figure("seed_spread_points", max(max(values) - min(values) for values in f1.values()), unit="points")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
