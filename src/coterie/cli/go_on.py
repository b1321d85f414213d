"""`coterie continue`: end a pause."""

import argparse

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.cli.which_run import add_run_flags, control_from, progress_of


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "continue",
        help="end a pause",
        description="Let a run that rests go on. A run that was stopped goes on by `coterie train … --resume` instead.",
    )
    add_run_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask for it."""
    status = control_from(args).go_on()
    if args.json:
        print_json(status)
    else:
        print(f"going on after {progress_of(status)}")
    return 0
