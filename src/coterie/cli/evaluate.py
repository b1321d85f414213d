"""`coterie evaluate`: how often a trained model is right."""

import argparse

from coterie.cli.formatting import print_json
from coterie.cli.forward_flags import DEVICES_TEXT, add_forward_flags, add_model_argument
from coterie.cli.parser import Parser
from coterie.config.flags import overrides_from
from coterie.units import counted, format_seconds


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "evaluate",
        help="compare a trained model's answers with the right ones",
        description="Let a trained model answer on data that hold the right answers, and compare: entity F1 as\n"
        "seqeval counts it (token-classification), accuracy, F1 and Matthews correlation (sequence-classification),\n"
        "Pearson and Spearman correlation (regression), perplexity (causal-lm), ROUGE (summarization).\n"
        f"{DEVICES_TEXT}",
    )
    add_model_argument(parser)
    parser.add_argument("--data", required=True, help="a data file or folder, with the right answers")
    add_forward_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the figures."""
    from coterie.config.forward import forward_recipe  # noqa: PLC0415 - see cli.main
    from coterie.coordinator.preflight import check_forward  # noqa: PLC0415

    recipe = forward_recipe(args.folder, args.data, overrides_from(args))
    check_forward(recipe, args.data, args.split)
    from coterie import api  # noqa: PLC0415 - imports torch: seconds, and a wrong flag should be told at once
    from coterie.cli.console import PlainConsole  # noqa: PLC0415

    with PlainConsole(as_json=args.json, shows_progress=not args.json) as console:
        found = api.run_evaluation(recipe, args.data, args.split, console)
    record = found.record
    if args.json:
        print_json(
            {
                "model": str(args.folder),
                "data": args.data,
                "split": record.split,
                "rows": found.rows,
                "loss": record.loss,
                "metrics": record.metrics,
                "details": record.details,
                "seconds": record.seconds,
                "devices": 1 if found.plan is None else len(found.plan.stages),
            }
        )
        return 0
    print(record.report)
    loss = "" if record.loss is None else f", loss {record.loss:.4f}"
    rows = f"{counted(found.rows, 'row')} in {format_seconds(record.seconds)}"
    print(f"{record.main_text}{loss}; {rows}")
    return 0
