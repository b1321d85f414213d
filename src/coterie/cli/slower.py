"""`coterie plan --slower`: what a run would do if a device slowed down half way."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coterie.errors import UsageError
from coterie.ids import WorkerId

if TYPE_CHECKING:
    from coterie.planner.plan import Plan
    from coterie.planner.request import PlanRequest

Forecast = dict[str, object]
"""What is told of one device: `device`, `times`, `worth`, `reason` and the figures behind it."""

_HINT = "write it like --slower phone=3, of a device that --device describes"


def add_slower_flag(parser: argparse.ArgumentParser) -> None:
    """`--slower`."""
    parser.add_argument(
        "--slower",
        action="append",
        default=[],
        metavar="NAME=TIMES",
        help="also tell which layers would move if this --device device took so many times as long from the middle of "
        "the run on. Repeatable; each is told for itself",
    )


def slower_from(args: argparse.Namespace, names: "tuple[str, ...]") -> dict[str, float]:
    """What `--slower` says, by device.

    Raises:
        UsageError: It is no such wish, or of a device that is not described.
    """
    found: dict[str, float] = {}
    for text in args.slower:
        name, _, number = text.rpartition("=")
        try:
            times = float(number)
        except ValueError:
            times = 0.0
        if not 0 < times < float("inf"):
            raise UsageError(f"--slower {text}: {number!r} is no number above 0", hint=_HINT)
        if name not in names:
            raise UsageError(f"--slower {text}: no --device is named {name!r}", hint=_HINT)
        found[name] = times
    return found


def forecasts(plan: "Plan", request: "PlanRequest", slower: Mapping[str, float], steps: int) -> tuple[Forecast, ...]:
    """For each device that slows down: what would be done, with the figures."""
    from coterie.planner.forecast import if_slower  # noqa: PLC0415 - see cli.main

    told: list[Forecast] = []
    for name, times in slower.items():
        found = if_slower(plan, request, WorkerId(name), times, remaining_steps=steps - steps // 2)
        told.append(
            {
                "device": name,
                "times": times,
                "worth": found.worth,
                "reason": found.reason,
                "gain_s": found.gain_s,
                "cost_s": found.cost_s,
                "moved_units": [move.unit for move in found.moves],
                "stages": found.plan.stages,
            }
        )
    return tuple(told)


def in_words(forecast: Mapping[str, object]) -> str:
    """One of them, for people."""
    what = "layers would move" if forecast["worth"] else "layers would stay"
    return f"{forecast['device']} {forecast['times']:g} times as slow half way: {what}: {forecast['reason']}"
