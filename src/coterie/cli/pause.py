"""`coterie pause`: let a run rest; its devices stay joined and idle."""

import argparse

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.cli.which_run import add_no_wait_flag, add_run_flags, control_from, progress_of, wait_while, words_for


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "pause",
        help="let a run rest, its devices idle but still joined",
        description="Let a run rest where no step is under way. Its devices stay joined, keep what they hold, and\n"
        "compute nothing until `coterie continue`. Numbers do not change: the run goes on as if nothing had been.",
    )
    add_run_flags(parser)
    add_no_wait_flag(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask for it, and wait until it rests."""
    control = control_from(args)
    status = control.pause()
    if not args.no_wait:
        if status.phase == "pausing" and not args.json:
            print("pausing: steps that have begun come to their end first", flush=True)
        status = wait_while(control, lambda now: now.phase == "pausing", status)
    if args.json:
        print_json(status)
    elif status.phase == "paused":
        print(f"paused after {progress_of(status)}; `coterie continue {words_for(control)}` goes on")
    elif args.no_wait:
        print(f"asked for; `coterie status {words_for(control)}` tells when it rests")
    else:
        print(f"the run is {status.phase} now")
    return 0
