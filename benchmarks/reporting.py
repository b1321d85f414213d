"""What every benchmark shares: its two flags, its tables, and its figures as JSON.

A benchmark is a script: `python benchmarks/links.py [--quick] [--json FILE]`. It builds a `Report`, adds tables and
figures while it runs, and calls `finish`, which prints the figures and writes the file:

    {"benchmark": "links", "quick": false, "figures": {"name": 1.0}, "machine": {...}, "commit": "0a1b2c3"}
"""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

WIDTH = 118


def parse_arguments(
    description: str, extra: Iterable[tuple[str, str]] = (), values: Iterable[tuple[str, str, str]] = ()
) -> argparse.Namespace:
    """The command line of a benchmark.

    Args:
        description: What is measured, one or two sentences.
        extra: Further on/off flags as (flag, help).
        values: Further flags with a value as (flag, placeholder, help).
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short run that shows it works; its figures are noisy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    for flag, text in extra:
        parser.add_argument(flag, action="store_true", help=text)
    for flag, placeholder, text in values:
        parser.add_argument(flag, metavar=placeholder, help=text)
    return parser.parse_args()


class Report:
    """Collects and prints what one benchmark found.

    Args:
        name: The benchmark's file name without `.py`.
        measured: What is measured, on what, and how: printed first and part of the JSON.
        arguments: The result of `parse_arguments`.
    """

    def __init__(self, name: str, measured: str, arguments: argparse.Namespace) -> None:
        self._name = name
        self._measured = measured
        self._quick = bool(arguments.quick)
        self._file: Path | None = arguments.json
        self._figures: dict[str, float] = {}
        self._targets: dict[str, tuple[str, float, str]] = {}
        self._console = Console(width=WIDTH, highlight=False)
        self._console.print(f"[bold]{name}[/bold]: {measured}")
        machine = describe_machine()
        self._console.print("machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))

    def note(self, text: str) -> None:
        """Print a sentence between tables."""
        self._console.print(text)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; the first column is left-aligned, the others right; floats keep three digits."""
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in rows:
            table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
        self._console.print(table)

    def figure(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "",
    ) -> None:
        """Record a named figure and the target it is compared with, if any."""
        self._figures[name] = float(value)
        if at_least is not None:
            self._targets[name] = ("≥", at_least, unit)
        elif at_most is not None:
            self._targets[name] = ("≤", at_most, unit)
        else:
            self._targets[name] = ("", 0.0, unit)

    def finish(self) -> int:
        """Print all figures beside their targets and write the JSON file.

        Returns:
            0 whether or not the targets were met: a benchmark reports, a test decides.
        """
        rows = []
        for name, value in self._figures.items():
            sign, bound, unit = self._targets[name]
            met = {"≥": value >= bound, "≤": value <= bound}.get(sign)
            verdict = "" if met is None else ("met" if met else "missed")
            rows.append((name, value, unit, f"{sign} {bound:g}" if sign else "", verdict))
        self.table("figures", ("name", "measured", "unit", "target", ""), rows)
        if self._file is not None:
            document = {
                "benchmark": self._name,
                "measured": self._measured,
                "quick": self._quick,
                "figures": self._figures,
                "machine": describe_machine(),
                "commit": current_commit(),
            }
            self._file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            self._console.print(f"written: {self._file}")
        return 0


def describe_machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor_name(),
        "cores": usable,
        "memory_gib": round(psutil.virtual_memory().total / 1024**3, 1),
        "load_1min": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def current_commit() -> str:
    """The short hash of the checkout's commit, `+` appended where tracked files differ; empty outside a checkout."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    folder = Path(__file__).resolve().parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
