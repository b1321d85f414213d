"""What `status`, `pause`, `continue` and `stop` share: which run is meant, and a few words about it."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.parser import Parser
from coterie.errors import UsageError

if TYPE_CHECKING:
    from coterie.coordinator.run_control import RunControl
    from coterie.metrics.status import RunStatus

CONTROL_LINK_VARIABLE = "COTERIE_CONTROL_LINK"
"""A control link here instead of on a command line, which every user of the machine can read."""

DEFAULT_RUN = "runs/latest"
POLL_S = 0.5


def add_run_flags(parser: Parser) -> None:
    """The run's folder, or its control link."""
    parser.add_argument("folder", nargs="?", type=Path, metavar="RUN", help=f"the run's folder (default {DEFAULT_RUN})")
    parser.add_argument(
        "--link",
        metavar="LINK",
        help="a run of another machine: what `coterie status --show-link` prints there, in quotes; "
        f"else the variable {CONTROL_LINK_VARIABLE}",
    )


def add_no_wait_flag(parser: Parser) -> None:
    """`--no-wait`."""
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the coordinator has heard it")


def control_from(args: argparse.Namespace) -> "RunControl":
    """The run that the command line means.

    Raises:
        UsageError: It names two.
    """
    from coterie.coordinator.run_control import RunControl  # noqa: PLC0415 - see cli.main

    if args.folder is not None and args.link is not None:
        raise UsageError("a folder and a control link were given", hint="give one of the two")
    if args.folder is not None:
        return RunControl(args.folder)
    link = args.link or os.environ.get(CONTROL_LINK_VARIABLE)
    return RunControl(link=link) if link else RunControl(DEFAULT_RUN)


def words_for(control: "RunControl") -> str:
    """What to write after a verb to mean this run again."""
    return "--link LINK" if control.folder is None else str(control.folder)


def wait_while(control: "RunControl", wanted: "Callable[[RunStatus], bool]", first: "RunStatus") -> "RunStatus":
    """Ask again and again while `wanted`; the first status of which it is not true."""
    status = first
    while wanted(status):
        time.sleep(POLL_S)
        status = control.status()
    return status


def progress_of(status: "RunStatus") -> str:
    """`step 12 of 300`, or that there was none yet."""
    return f"step {status.step} of {status.total_steps}" if status.total_steps else "the preparation"
