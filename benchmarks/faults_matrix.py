"""The fault matrix: each kind of trouble, at the first, middle and last stage, under two schedules; a run for each."""

import time
from pathlib import Path

import msgspec

from faults_setting import (
    LONGEST_S,
    NAMES,
    POLL_S,
    Setting,
    Struck,
    final_loss,
    hosts,
    largest_difference,
    last_words,
    losses_of,
    strike,
    undisturbed,
    unequal,
    what_happened,
)
from testbed import Bed, Host, wait_for
from testbed.faults import FAULTS, Fault

PLACES = ("first", "middle", "last")
SCHEDULES = ("flush", "stash")
SEEDS = 5
"""Undisturbed runs whose final losses say how far a `stash` run's may lie from another."""
STRIKE_STEP = 8
QUICK = (("kill -9", "middle", "flush"), ("clean leave", "last", "flush"), ("coordinator killed", "first", "flush"))
QUICK_SEEDS = 2


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run with one fault.

    Attributes:
        failure: Why it does not count as gone through; empty if it does.
        unequal: Tensors that differ from the undisturbed run's; None where they need not be equal.
        loss: The final one.
    """

    fault: str
    place: str
    schedule: str
    failure: str = ""
    struck: Struck | None = None
    unequal: int | None = None
    loss: float | None = None

    def row(self) -> tuple[object, ...]:
        """For the table."""
        struck = self.struck or Struck(at_s=0.0)
        equal = "" if self.unequal is None else ("yes" if self.unequal == 0 else f"{self.unequal} differ")
        return (
            self.fault,
            self.place,
            self.schedule,
            self.failure or "ok",
            _number(struck.noticed_s),
            _number(struck.next_step_s),
            struck.replayed_steps,
            equal or _number(self.loss),
        )


COLUMNS = ("fault", "stage", "schedule", "outcome", "noticed s", "next step s", "replayed", "weights equal, or loss")


class Matrix:
    """Runs cells of one setting; undisturbed runs are made when a cell needs one."""

    def __init__(self, setting: Setting, *, seeds: int = SEEDS) -> None:
        self._setting = setting
        self._seeds = seeds
        self._whole: Path | None = None
        self._spread: tuple[float, float] | None = None

    def cell(self, fault: Fault, place: str, schedule: str) -> Cell:
        """Run one cell to its end, whatever that is."""
        cell = Cell(fault=fault.name, place=place, schedule=schedule)
        try:
            run, struck = self._struck_run(fault, place, schedule)
        except (TimeoutError, RuntimeError) as error:
            return msgspec.structs.replace(cell, failure=str(error))
        losses = losses_of(run)
        cell = msgspec.structs.replace(cell, struck=struck, loss=final_loss(losses))
        return msgspec.structs.replace(cell, **self._verdict(run, schedule, losses))

    def _struck_run(self, fault: Fault, place: str, schedule: str) -> tuple[Path, Struck]:
        name = f"{fault.name}-{place}-{schedule}".replace("/", "").replace(" ", "_")
        with self._setting.bed(name) as bed:
            run = bed.begin(self._setting.words(schedule), hosts())
            wait_for(
                f"step {STRIKE_STEP}",
                lambda: run.events.steps() >= STRIKE_STEP,
                timeout_s=LONGEST_S,
                alive=lambda: run.runs,
            )
            workers = run.events.stage_workers()
            host = bed.hosts[workers[{"first": 0, "middle": len(workers) // 2, "last": -1}[place]]]
            at_s = strike(fault, bed, host)
            self._wait(fault, bed, host)
            if run.exit_code:
                raise RuntimeError(f"the run ended with code {run.exit_code}: {last_words(run.log)}")
            return run.output, what_happened(run.events, at_s, host.name)

    def _wait(self, fault: Fault, bed: Bed, host: Host) -> None:
        """Until the run ends; the fault is mended meanwhile."""
        assert bed.coordinator is not None
        begin_s, mended = time.monotonic(), False
        while bed.coordinator.runs:
            passed_s = time.monotonic() - begin_s
            if not mended and passed_s > fault.mend_after_s:
                fault.mend(bed, host)
                mended = True
            if passed_s > LONGEST_S:
                raise TimeoutError(f"the run does not go on: {last_words(bed.coordinator.log)}")
            time.sleep(POLL_S)

    def _verdict(self, run: Path, schedule: str, losses: list[float]) -> dict[str, object]:
        """Whether nothing was lost."""
        if len(losses) != self._setting.steps:
            return {"failure": f"{len(losses)} of {self._setting.steps} steps are recorded"}
        if schedule == "flush":
            self._whole = self._whole or undisturbed(self._setting, schedule)
            count = unequal(run, self._whole)
            worst = f"weights differ by up to {largest_difference(self._whole, run):.1e}" if count else ""
            return {"unequal": count, "failure": worst}
        low, high = self._bounds(schedule)
        loss = final_loss(losses)
        outside = "" if low <= loss <= high else f"loss {loss:.4f} outside {low:.4f}-{high:.4f}"
        return {"failure": outside}

    def _bounds(self, schedule: str) -> tuple[float, float]:
        """Of final losses: those of the undisturbed seeds, and half their spread beyond, as they are few."""
        if self._spread is None:
            found = [final_loss(losses_of(undisturbed(self._setting, schedule, seed))) for seed in range(self._seeds)]
            margin = (max(found) - min(found)) / 2
            self._spread = min(found) - margin, max(found) + margin
        return self._spread


def chosen_cells(*, quick: bool, words: str | None) -> list[tuple[Fault, str, str]]:
    """The cells to run: all, a few, or those that every one of some words belongs to.

    Args:
        quick: A few only, unless `words` says which.
        words: Such as `kill,middle|cut,middle`: alternatives between bars, of each all words must fit.
    """
    every = [(fault, place, schedule) for schedule in SCHEDULES for fault in FAULTS for place in PLACES]
    if words:
        ways = [way.split(",") for way in words.split("|")]
        return [
            (fault, place, schedule)
            for fault, place, schedule in every
            if any(all(word in f"{fault.name} {place} {schedule}" for word in way) for way in ways)
        ]
    return [cell for cell in every if not quick or (cell[0].name, cell[1], cell[2]) in QUICK]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


assert len(NAMES) == len(PLACES)
