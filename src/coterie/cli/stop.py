"""`coterie stop`: end a run with a checkpoint, and say how to go on."""

import argparse
from typing import TYPE_CHECKING

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.cli.which_run import add_no_wait_flag, add_run_flags, control_from, progress_of, wait_while, words_for
from coterie.errors import ControlRefusedError, NetworkError

if TYPE_CHECKING:
    from coterie.coordinator.run_control import RunControl
    from coterie.metrics.status import RunStatus


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "stop",
        help="end a run with a checkpoint",
        description="End a run with a checkpoint at the next place where its pipeline is empty, as Ctrl-C does,\n"
        "and say how to go on later.",
    )
    add_run_flags(parser)
    parser.add_argument("--now", action="store_true", help="at once: what was done since the last checkpoint is lost")
    add_no_wait_flag(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask for it, and wait until the run has ended."""
    control = control_from(args)
    status = control.stop(now=args.now)
    if args.no_wait:
        print_json(status) if args.json else print(
            f"asked for; `coterie status {words_for(control)}` tells how it ends"
        )
        return 0
    if not args.json:
        print(
            f"stopping after {progress_of(status)}" + ("" if args.now else ": a checkpoint is made first"), flush=True
        )
    status = _ended(control, status)
    if args.json:
        print_json(status)
    else:
        print(_farewell(control, status))
    return 0


def _ended(control: "RunControl", first: "RunStatus") -> "RunStatus":
    """The status of the run when it has ended; from another machine the last one before it did."""
    last = first

    def goes_on(status: "RunStatus") -> bool:
        nonlocal last
        last = status
        return not status.has_ended

    try:
        return wait_while(control, goes_on, first)
    except (NetworkError, ControlRefusedError):
        if control.folder is not None:
            raise
        return last


def _farewell(control: "RunControl", status: "RunStatus") -> str:
    from coterie.coordinator.run_control import ending, next_step  # noqa: PLC0415 - see cli.main

    if control.folder is None:
        return f"stopped after {progress_of(status)}; on its machine it goes on from {status.output} by --resume"
    advice = next_step(status, control.folder)
    return f"the run in {control.folder} {ending(status, control.folder)}" + (f"\n{advice}" if advice else "")
