"""`coterie predict`: what a trained model says about new data."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.formatting import print_json
from coterie.cli.forward_flags import DEVICES_TEXT, add_forward_flags, add_model_argument
from coterie.cli.parser import Parser
from coterie.config.flags import overrides_from
from coterie.errors import DataError, UsageError
from coterie.units import counted

if TYPE_CHECKING:
    from coterie.api import Prediction


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "predict",
        help="let a trained model answer on new data",
        description="Let a trained model answer on new data: a tag for every word (token-classification), a label\n"
        "(sequence-classification), a number (regression), the text that follows (causal-lm, summarization).\n"
        f"Without --data and --text, reads texts from the standard input, one a line.\n{DEVICES_TEXT}",
    )
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", help="a data file or folder; answers in it are ignored")
    source.add_argument("--text", action="append", metavar="TEXT", help="a text to answer on. Repeatable")
    parser.add_argument(
        "--pair",
        action="append",
        metavar="TEXT",
        help="the second text of a pair, or what an instruction is about: one for each --text, in the same order",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the answers there, in the format that its name says: .jsonl, .csv, .txt, or for tags .conll; "
        "default: the standard output, in the task's usual format",
    )
    add_forward_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Predict and write."""
    from coterie.config.forward import forward_recipe  # noqa: PLC0415 - see cli.main
    from coterie.coordinator.preflight import check_forward  # noqa: PLC0415
    from coterie.tasks.catalog import get_task  # noqa: PLC0415
    from coterie.tasks.writers import check_suffix  # noqa: PLC0415

    recipe = forward_recipe(args.folder, args.data, overrides_from(args))
    if args.output is not None:
        check_suffix(args.output, get_task(recipe.data.task).suffixes)
    check_forward(recipe, args.data, args.split)
    data = args.data or _texts(args) or _lines_of_stdin()
    from coterie import api  # noqa: PLC0415 - imports torch: seconds, and a wrong flag should be told at once
    from coterie.cli.console import PlainConsole  # noqa: PLC0415

    quiet_output = args.json or args.output is None
    with PlainConsole(as_json=quiet_output, shows_progress=not args.json) as console:
        found = api.run_prediction(recipe, data, args.split, console)
    _write(found, args)
    return 0


def _texts(args: argparse.Namespace) -> list[str] | list[tuple[str, str]]:
    """What --text and --pair say; empty if nothing.

    Raises:
        UsageError: There is not one --pair for each --text.
    """
    texts: list[str] = args.text or []
    if not args.pair:
        return texts
    if len(texts) != len(args.pair):
        raise UsageError(
            f"--text is given {counted(len(texts), 'time')} and --pair {counted(len(args.pair), 'time')}",
            hint="each --text TEXT needs its --pair TEXT",
        )
    return list(zip(texts, args.pair, strict=True))


def _lines_of_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("there is nothing to predict", hint="give --data FILE or --text SENTENCE, or pipe lines in")
    lines = [line.strip() for line in sys.stdin]
    sentences = [line for line in lines if line]
    if not sentences:
        raise DataError("the standard input holds no sentence", hint="pipe one sentence a line in")
    return sentences


def _write(found: "Prediction", args: argparse.Namespace) -> None:
    if args.output is not None:
        found.task.write(args.output, found.rows)
    if args.json:
        output = None if args.output is None else str(args.output)
        rows = found.rows if args.output is None else None
        print_json({"rows": len(found.rows), "seconds": found.seconds, "output": output, "predictions": rows})
    elif args.output is None and args.text and found.texts is not None:
        # Who asks by hand wants to read the answer; rows come as the task's own format.
        print("\n\n".join(text.strip() for text in found.texts))
    elif args.output is None:
        print(found.task.text(found.rows), end="")
    else:
        print(f"{counted(len(found.rows), 'row')} written to {args.output}")
