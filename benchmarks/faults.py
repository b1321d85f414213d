"""What a run goes through: killed, frozen, cut off, slowed, out of memory or power, left, its coordinator killed."""

import tempfile
from pathlib import Path

from faults_matrix import COLUMNS, QUICK_SEEDS, SEEDS, Cell, Matrix, chosen_cells
from faults_overhead import measure_overhead
from faults_random import random_faults
from faults_rebalance import rebalance
from faults_setting import Setting
from reporting import Report, parse_arguments
from testbed.facilities import describe

PARTS = ("matrix", "random", "overhead", "rebalance")
STEPS, QUICK_STEPS = 60, 30
RANDOM_STEPS, QUICK_RANDOM_STEPS = 300, 60
RANDOM_FAULTS, QUICK_RANDOM_FAULTS = 20, 3


def main() -> None:
    arguments = parse_arguments(
        __doc__ or "",
        values=(
            ("--only", "PARTS", f"which of {', '.join(PARTS)}; default: all"),
            ("--cells", "WORDS", "of the matrix: only some cells, such as 'kill,middle|cut,flush'"),
            ("--keep", "FOLDER", "work in this folder and leave everything there"),
            ("--method", "METHOD", "what is trained: lora (default), full …"),
        ),
    )
    parts = arguments.only.split(",") if arguments.only else PARTS
    about = "a tiny BERT over three workers in processes of their own, links through a relay"
    report = Report("faults", f"{about}; {describe()}", arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(arguments.keep or name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        quick, method = arguments.quick, arguments.method or "lora"
        if "matrix" in parts:
            _matrix(report, folder / "matrix", method, cells=arguments.cells, quick=quick)
        if "random" in parts:
            _random(report, folder / "random", method, quick=quick)
        if "overhead" in parts:
            measure_overhead(report, folder / "overhead", quick=quick)
        if "rebalance" in parts:
            rebalance(report, folder / "rebalance", quick=quick)
    report.finish()


def _matrix(report: Report, folder: Path, method: str, *, cells: str | None, quick: bool) -> None:
    setting = Setting(folder, steps=QUICK_STEPS if quick else STEPS, method=method)
    matrix = Matrix(setting, seeds=QUICK_SEEDS if quick else SEEDS)
    done: list[Cell] = []
    for fault, place, schedule in chosen_cells(quick=quick, words=cells):
        done.append(matrix.cell(fault, place, schedule))
        report.note(" | ".join(map(str, done[-1].row())))
    setting.close()
    report.table("fault matrix", COLUMNS, (cell.row() for cell in done))
    report.figure("cells", len(done))
    report.figure("cells_failed", sum(bool(cell.failure) for cell in done), at_most=0)
    killed = [cell.struck for cell in done if cell.fault == "kill -9" and cell.struck is not None]
    noticed = [struck.noticed_s for struck in killed if struck.noticed_s is not None]
    next_steps = [struck.next_step_s for struck in killed if struck.next_step_s is not None]
    if noticed:
        report.figure("worst_notice_of_a_kill_s", max(noticed), at_most=1.0, unit="s")
    if next_steps:
        report.figure("worst_recovery_s", max(next_steps), at_most=10.0, unit="s")


def _random(report: Report, folder: Path, method: str, *, quick: bool) -> None:
    setting = Setting(folder, steps=QUICK_RANDOM_STEPS if quick else RANDOM_STEPS, method=method)
    outcome = random_faults(setting, QUICK_RANDOM_FAULTS if quick else RANDOM_FAULTS)
    setting.close()
    report.table("random faults in one run", ("fault", "device", "at step", "next step s"), outcome.rows)
    report.note(outcome.failure or "the run finished")
    report.figure("random_faults", len(outcome.rows))
    report.figure("random_loss_difference", outcome.loss_difference, at_most=1e-6)
    report.figure("random_tensors_that_differ", outcome.unequal, at_most=0)


if __name__ == "__main__":
    main()
