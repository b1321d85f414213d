"""`coterie train`: fine-tune a model over this machine's workers and those that join."""

import argparse
from pathlib import Path

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.config.flags import add_recipe_flags, overrides_from


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "train",
        help="fine-tune a model over several devices",
        description="Fine-tune a model as a recipe says. Flags override the recipe's fields.\n"
        "Prints a link with which `coterie worker LINK` joins from other machines, if the recipe waits for some; in a\n"
        "terminal a QR code of it too.",
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="the recipe, a TOML file; without one, flags say it all")
    parser.add_argument(
        "--qr",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show the join link as a QR code too; default: if the output is a terminal",
    )
    add_recipe_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train and print the summary."""
    from coterie.config.loading import load_recipe  # noqa: PLC0415 - see cli.main
    from coterie.coordinator.preflight import check_training  # noqa: PLC0415

    recipe = load_recipe(args.recipe, overrides_from(args))
    check_training(recipe)
    from coterie.cli.console import ConsoleObserver  # noqa: PLC0415

    observer = ConsoleObserver(as_json=args.json, qr=args.qr)
    observer.notice(f"loading {recipe.model.name} and the data …")  # what follows takes seconds before it says a word
    from coterie import api  # noqa: PLC0415 - imports torch, and a wrong recipe should be told at once
    from coterie.metrics.summary import print_summary, summary_line  # noqa: PLC0415

    try:
        result = api.train(recipe, observer)
    finally:
        observer.close()
    if args.json:
        print_json(
            {
                "model": str(result.model_folder) if result.model_folder.exists() else None,
                "run": str(result.run_folder),
                "summary": result.summary,
                "losses": result.losses,
            }
        )
        return 0
    print_summary(result.summary)
    print(summary_line(result.summary))
    if not result.model_folder.exists():
        print("the server goes on alone; fetch the side network later by the same command with --resume")
        return 0
    print(f"model: {result.model_folder}  plot: {result.run_folder / api.PLOT}")
    return 0
