"""The command `coterie`: finds the verb, runs it, turns errors into messages and exit codes.

A verb is a module with `add_parser(verbs)`, which registers its flags, and `run(args) -> int`. Verb modules import
torch and whatever else is slow inside `run`, so that `coterie --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from coterie import __version__, logs
from coterie.cli import (
    audit,
    demo,
    doctor,
    evaluate,
    export,
    go_on,
    init,
    known,
    pause,
    plan,
    predict,
    profile,
    service,
    status,
    stop,
    train,
    verify,
    worker,
)
from coterie.cli.failures import report
from coterie.cli.parser import Parser, add_common_flags


class Verb(Protocol):
    """What a verb's module offers."""

    def add_parser(self, verbs: "argparse._SubParsersAction[Parser]") -> Parser:
        """Register the verb and its flags."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code."""
        ...


VERBS: tuple[Verb, ...] = (
    *(demo, init, plan, train, worker, service),
    *(status, pause, go_on, stop, known),
    *(evaluate, predict, export, verify, audit, profile, doctor),
)
"""In the order of the help page."""


def build_parser() -> Parser:
    """The parser of the whole command."""
    parser = Parser(
        prog="coterie",
        description="Fine-tune a transformer together, on the devices you already own.",
        epilog="`coterie VERB --help` explains a verb. docs/ has guides and the list of errors.",
    )
    parser.add_argument("--version", action="version", version=f"coterie {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", required=True, parser_class=Parser)
    for verb in VERBS:
        added = verb.add_parser(verbs)
        add_common_flags(added)
        added.set_defaults(perform=verb.run)  # not `run`: a flag may be called so
        parser.verbs[added.prog.rpartition(" ")[2]] = added
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json, verbose = "--json" in words, "--verbose" in words
    for stream in (sys.stdout, sys.stderr):
        _never_fail_on_a_character(stream)
    logs.configure(verbose=verbose)
    try:
        try:
            args = build_parser().parse(words)
            code: int = args.perform(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (`| head`) has left. The interpreter's own last flush must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001, RUF100 - the outermost frame: reported, never dropped
        return report(error, as_json=as_json, verbose=verbose)
    return code


def _never_fail_on_a_character(stream: TextIO) -> None:
    """A terminal that cannot show an arrow gets a question mark, not an exception (Windows code pages)."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
