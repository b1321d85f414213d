"""`coterie plan --compare`: local LoRA, pipeline LoRA, side-tuning and both together, for described devices."""

import argparse
from typing import TYPE_CHECKING

from coterie.cli.formatting import print_json
from coterie.errors import UsageError

if TYPE_CHECKING:
    from coterie.config.recipe import Recipe
    from coterie.config.side_section import SideSection
    from coterie.coordinator.plan_facts import PlanFacts
    from coterie.profiles.hypothetical import EvenLinks, HypotheticalDevice

_FLAGS = ("owner", "server")


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    """`--compare`, `--owner`, `--server`."""
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare ways for --device devices: LoRA on one or as a pipeline, side-tuning with a server, and a "
        "pipeline with a server; time, memory, bytes, energy (modelled from stated watts), and who sees what",
    )
    parser.add_argument(
        "--owner", metavar="NAME", help="with --compare: the device that holds the data (default: the first)"
    )
    parser.add_argument(
        "--server",
        metavar="NAME",
        help="with --compare: the device that trains the side network (default: the fastest of the others)",
    )


def check_compare_flags(args: argparse.Namespace) -> None:
    """Refuse what has no meaning together.

    Raises:
        UsageError: Devices are not described, or a flag of --compare stands alone.
    """
    alone = [flag for flag in _FLAGS if getattr(args, flag) is not None]
    if not args.compare and alone:
        raise UsageError(f"--{alone[0]} is for --compare", hint="add --compare, or leave it out")
    if args.compare and not args.device:
        raise UsageError(
            "--compare is for devices that are described",
            hint="describe each with --device, such as --device name=phone,memory=4GiB,speed=0.5,watts=4",
        )
    if args.compare and args.schedule_grid:
        raise UsageError("--compare draws no schedule", hint="leave --schedule-grid out")


def split_side(overrides: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Settings of a run, and those of side-tuning: in a comparison these need no mode to be set."""
    side = {key: value for key, value in overrides.items() if key.startswith("side.")}
    return {key: value for key, value in overrides.items() if key not in side}, side


def side_section(recipe: "Recipe", overrides: dict[str, object]) -> "SideSection":
    """The recipe's own settings of side-tuning, or those that flags give.

    Raises:
        RecipeError: They are wrong; all of them are named.
    """
    from coterie.config.loading import load_recipe  # noqa: PLC0415 - see cli.main

    if not overrides:
        return recipe.side
    fixed = {"model.name": recipe.model.name, "data.train": recipe.data.train, "data.task": recipe.data.task}
    return load_recipe(None, {**fixed, "train.mode": "side", **overrides}).side


def compare(
    recipe: "Recipe",
    side: "SideSection",
    devices: "tuple[HypotheticalDevice, ...]",
    links: "EvenLinks | None",
    args: argparse.Namespace,
) -> int:
    """Compare and print; exit code 7 if nothing fits."""
    from coterie.cli.console import PlainConsole  # noqa: PLC0415 - see cli.main
    from coterie.cli.described import facts_of  # noqa: PLC0415
    from coterie.coordinator.comparing import Described, ways_request  # noqa: PLC0415
    from coterie.errors import DoesNotFitError  # noqa: PLC0415
    from coterie.planner.explain_ways import explain_ways, ways_table  # noqa: PLC0415
    from coterie.planner.ways import compare_ways  # noqa: PLC0415

    console = PlainConsole(as_json=args.json)
    described = Described(devices=devices, links=links, owner=args.owner, server=args.server)

    def facts(wanted: "Recipe") -> "PlanFacts":
        return facts_of(wanted, console)

    request = ways_request(recipe, side, described, facts)
    ways = compare_ways(request)
    if args.json:
        print_json({"owner": request.owner, "server": request.server, "table": ways_table(ways), "ways": ways})
    else:
        print(explain_ways(ways, request))
    return 0 if any(way.fits for way in ways) else DoesNotFitError.exit_code
