"""`coterie audit`: what a side-tuning server could read from what it gets, on a model and data of one's own."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.formatting import aligned, print_json
from coterie.cli.forward_flags import READING
from coterie.cli.parser import Parser
from coterie.config.flags import add_recipe_flags, overrides_from
from coterie.errors import UsageError
from coterie.units import counted

if TYPE_CHECKING:
    from coterie.api.auditing import Audit
    from coterie.sidetuning.leakage import Hits, LabelLeak

_KEYS = (
    *READING,
    "side.first_layer",
    "side.upload",
    "side.token_selector",
    "train.seed",
)


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "audit",
        help="measure what a side-tuning server could read from what it gets",
        description="Send a pretend server some rows as side-tuning would (mode = side), and count how many tokens of\n"
        "the text it guesses from the activations of each layer, and how many labels from prediction differences.\n"
        "The attacks are simple ones: a determined server reads more, never less.",
    )
    parser.add_argument("model", help="a model folder, GGUF file, or name on the Hugging Face hub")
    parser.add_argument("--data", required=True, help="a data file or folder with labels; its training split is used")
    parser.add_argument("--rows", type=int, default=200, help="rows to look at, drawn at random (default 200)")
    parser.add_argument(
        "--candidates",
        default="all",
        metavar="N",
        help="tokens that guesses choose from: all of the vocabulary, or those of these rows and others up to N, "
        "which is faster and makes guessing easier (default all)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates over the layers as a PNG")
    add_recipe_flags(parser, sections=(), keys=_KEYS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Audit and print the rates."""
    from coterie.config.loading import load_recipe  # noqa: PLC0415 - see cli.main
    from coterie.coordinator.preflight import check_planning  # noqa: PLC0415

    candidates = _candidates(args)
    fixed = {"model.name": args.model, "data.train": args.data, "train.mode": "side"}
    recipe = load_recipe(None, {**fixed, **overrides_from(args)})
    check_planning(recipe)
    from coterie import api  # noqa: PLC0415 - imports torch: seconds, and a wrong flag should be told at once
    from coterie.metrics.rows_display import RowsDisplay  # noqa: PLC0415

    display = RowsDisplay(sys.stderr, noun="done:") if sys.stderr.isatty() and not args.json else None
    try:
        found = api.audit(
            recipe, api.AuditWish(rows=args.rows, candidates=candidates), None if display is None else display.show
        )
    finally:
        if display is not None:
            display.hide()
    if args.plot is not None:
        from coterie.cli.audit_plot import plot_audit  # noqa: PLC0415 - see cli.main

        plot_audit(found, args.plot)
    if args.json:
        print_json(found)
    else:
        print(_text(found))
        if args.plot is not None:
            print(f"\nplot: {args.plot}")
    return 0


def _candidates(args: argparse.Namespace) -> int | None:
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}", hint="look at one row at least")
    if args.candidates == "all":
        return None
    if not args.candidates.isdecimal() or int(args.candidates) < 1:
        raise UsageError(f"--candidates is {args.candidates!r}", hint="write --candidates all, or a number from 1 on")
    return int(args.candidates)


def _text(found: "Audit") -> str:
    tokens = found.tokens
    sent = f"{tokens.sent:,} activations of each layer, {tokens.sent_text:,} of them of text tokens"
    which = "the tokens that enter the loss" if found.side.selects_tokens else "all tokens"
    choice = f"{tokens.candidates:,} of {found.vocabulary:,} tokens to choose from"
    rows: list[tuple[str, ...]] = [("layer", "by embedding", "", "by activation", "")]
    rows.append(("", "the very token", "one of its row", "the very token", "one of its row"))
    for layer in tokens.layers:
        embedding = ("–", "–") if layer.by_embedding is None else _cells(layer.by_embedding)
        rows.append((str(layer.layer), *embedding, *_cells(layer.by_activation)))
    rows.append(("always the same guess", *_cells(tokens.guess), "", ""))
    what = f"{found.model}, {found.task}: {counted(found.rows, 'row')}, {which} as {found.side.upload}"
    return "\n".join(
        (
            f"{what}: {sent}",
            "",
            f"Text guessed from single activations ({choice})",
            aligned(rows),
            "",
            _labels(found.labels),
            "One of its row: a token of the text that at most a tenth of the rows have.",
            "These attacks are simple: a server that learns to invert activations reads more.",
        )
    )


def _cells(hits: "Hits") -> tuple[str, str]:
    own = "–" if hits.own is None else f"{hits.own:.1%}"
    return own, f"{hits.row:.1%}"


def _labels(leak: "LabelLeak | None") -> str:
    direct = "Labels in direct mode: all, they are sent."
    if leak is None:
        return f"{direct} Additive mode does not take this task."
    error = "" if leak.largest_error is None else f" (largest error {leak.largest_error:.2g})"
    return f"{direct} From the prediction differences of additive mode: {leak.recovered:.1%} of {leak.labels:,}{error}."
