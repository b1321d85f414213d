"""The flags by which a device's owner says on which terms it is lent."""

import argparse
import re
from pathlib import Path

from coterie.cli.parser import Parser
from coterie.errors import UsageError
from coterie.measure.simulated_battery import SIMULATED
from coterie.worker.conditions import OwnerConditions
from coterie.worker.settings import MIN_BATTERY

YIELD_SHARE = "25%"

_PERCENT = re.compile(r"^(\d+(?:\.\d+)?)\s*%$")


def add_terms(parser: Parser) -> None:
    """Register the flags."""
    group = parser.add_argument_group("the owner's terms")
    group.add_argument("--only-on-power", action="store_true", help="leave when the device is unplugged")
    group.add_argument(
        "--min-battery",
        default=f"{MIN_BATTERY:.0%}",
        metavar="PERCENT",
        help=f"leave when the battery is down to this (default {MIN_BATTERY:.0%}%); 0%% to use all of it",
    )
    group.add_argument("--max-celsius", type=float, metavar="DEGREES", help="leave when the device is hotter")
    group.add_argument(
        "--cpu-share",
        default="100%",
        metavar="PERCENT",
        help="most of a core's speed to take, or of a GPU's time; default: all",
    )
    group.add_argument(
        "--yield",
        dest="yields",
        action="store_true",
        help="slow down, and run at low priority, while somebody works on the device",
    )
    group.add_argument(
        "--yield-share",
        default=YIELD_SHARE,
        metavar="PERCENT",
        help=f"with --yield: what to take of a core's speed then (default {YIELD_SHARE}%)",
    )
    group.add_argument(
        "--memory-file",
        type=Path,
        metavar="FILE",
        help="a file with a size such as 400MiB, which limits the worker while it exists; read anew all the time",
    )
    group.add_argument("--no-keep-awake", action="store_true", help="let the machine go to sleep while it computes")
    group.add_argument("--watts", type=float, help="what the device draws while it computes, if nothing measures it")
    group.add_argument(
        "--battery",
        default="auto",
        metavar="SOURCE",
        help="where to ask about the battery: auto (default), none, or simulated:80%%,-2%%/min for trying things out",
    )


def terms_of(args: argparse.Namespace) -> OwnerConditions:
    """The terms as the flags give them.

    Raises:
        UsageError: One of them makes no sense.
    """
    return OwnerConditions(
        only_on_power=args.only_on_power,
        min_battery=_part("--min-battery", args.min_battery, least=0.0),
        max_celsius=args.max_celsius,
        share=_part("--cpu-share", args.cpu_share, least=0.01),
        yields_to=_part("--yield-share", args.yield_share, least=0.01) if args.yields else None,
    )


def battery_of(args: argparse.Namespace) -> str:
    """The battery's source."""
    source: str = args.battery
    if source not in ("auto", "none") and not source.startswith(SIMULATED):
        raise UsageError(f"--battery is {source}", hint="write auto, none, or simulated:80%,-2%/min")
    return source


def watts_of(args: argparse.Namespace) -> float | None:
    """What the owner states."""
    watts: float | None = args.watts
    if watts is not None and not 0 < watts < 1e4:
        raise UsageError(f"--watts is {watts:g}", hint="a laptop draws 5 to 60 W more while it computes than idle")
    return watts


def memory_file_of(args: argparse.Namespace) -> Path | None:
    """The owner's file, looked at once so that a mistake in it is told at once."""
    file: Path | None = args.memory_file
    if file is not None:
        from coterie.measure.pressure import check_memory_file  # noqa: PLC0415 - needed here only

        check_memory_file(file)
    return file


def _part(flag: str, text: str, *, least: float) -> float:
    found = _PERCENT.match(text.strip())
    part = float(found[1]) / 100 if found is not None else -1.0
    if not least <= part <= 1:
        raise UsageError(f"{flag} is {text}", hint=f"write a share such as 50%, at least {least:.0%}, at most 100%")
    return part
