"""`coterie plan`: who would run what, and what it would cost, without training."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.compare import add_compare_flags, check_compare_flags, compare, side_section, split_side
from coterie.cli.devices import add_device_flags, devices_from, links_from
from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.cli.slower import Forecast, add_slower_flag, forecasts, in_words, slower_from
from coterie.config.flags import add_recipe_flags, overrides_from
from coterie.errors import UsageError
from coterie.ids import WorkerId
from coterie.units import counted, format_seconds

if TYPE_CHECKING:
    from coterie.config.recipe import LocalWorker, Recipe
    from coterie.planner.plan import Plan
    from coterie.planner.request import PlanRequest
    from coterie.profiles.hypothetical import EvenLinks, HypotheticalDevice

_SECTIONS = ("model", "data", "train", "side", "plan", "cluster")


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "plan",
        help="show the plan of a run without training",
        description="Show which device would run which layers, with memory and time, and train nothing.\n"
        "Workers join and are measured as by `coterie train`; or describe devices with --device, which are planned\n"
        "for from this machine's own speed (measured once, then kept). Exit code 7 if nothing fits.\n"
        "With --compare: which way of fine-tuning takes how much of whom, and who gets to see what.",
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="the recipe, a TOML file; without one, flags say it all")
    add_device_flags(parser)
    add_compare_flags(parser)
    add_slower_flag(parser)
    parser.add_argument("--schedule-grid", action="store_true", help="draw the order of forwards and backwards")
    add_recipe_flags(parser, sections=_SECTIONS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    from coterie.config.loading import load_recipe  # noqa: PLC0415 - see cli.main
    from coterie.coordinator.preflight import check_planning  # noqa: PLC0415

    check_compare_flags(args)
    devices, links = devices_from(args), links_from(args)
    slower = slower_from(args, tuple(device.name for device in devices))
    overrides = overrides_from(args)
    side_overrides: dict[str, object] = {}
    if args.compare:
        overrides, side_overrides = split_side(overrides)
    if devices:
        overrides |= {"cluster.workers": len(devices), "cluster.local_workers": _as_local(devices, args)}
    recipe = load_recipe(args.recipe, overrides)
    check_planning(recipe)
    if args.compare:
        return compare(recipe, side_section(recipe, side_overrides), devices, links, args)
    if recipe.train.mode == "side":
        raise UsageError(
            "a side-tuning run is planned beside the other ways",
            hint="add --compare, and describe devices and server with --device",
        )
    told: tuple[Forecast, ...] = ()
    if devices:
        plan, request, steps = _imagined(recipe, devices, links, args)
        explanation = _explained(plan, request)
        told = forecasts(plan, request, slower, steps)
    else:
        plan, explanation, steps = _measured(recipe, args)
    grid = _grid(plan) if args.schedule_grid else ""
    seconds = plan.predicted_step_s * steps
    if args.json:
        more: dict[str, object] = ({"schedule_grid": grid} if grid else {}) | ({"slower": told} if told else {})
        print_json({"plan": plan, "steps": steps, "predicted_run_s": seconds} | more)
        return 0
    print(explanation)
    print(f"{counted(steps, 'step')}, about {format_seconds(seconds)}")
    for forecast in told:
        print(in_words(forecast))
    if grid:
        print(f"\n{grid}")
    return 0


def _as_local(devices: "tuple[HypotheticalDevice, ...]", args: argparse.Namespace) -> "tuple[LocalWorker, ...]":
    """The first two of described devices stand for local workers: the owner's, where data are to stay there."""
    from coterie.config.recipe import LocalWorker  # noqa: PLC0415 - see cli.main

    return () if args.compare else tuple(LocalWorker(name=device.name) for device in devices[:2])


def _imagined(
    recipe: "Recipe",
    devices: "tuple[HypotheticalDevice, ...]",
    links: "EvenLinks | None",
    args: argparse.Namespace,
) -> "tuple[Plan, PlanRequest, int]":
    """A plan for described devices; needs no torch where the facts are known."""
    from coterie.cli.console import PlainConsole  # noqa: PLC0415 - see cli.main
    from coterie.cli.described import facts_of  # noqa: PLC0415
    from coterie.coordinator.planning import plan_request  # noqa: PLC0415
    from coterie.planner import make_plan  # noqa: PLC0415
    from coterie.profiles.hypothetical import hypothetical_cluster  # noqa: PLC0415

    facts = facts_of(recipe, PlainConsole(as_json=args.json))
    owners = tuple(WorkerId(device.name) for device in devices[:2])
    cluster = hypothetical_cluster(devices, facts.device, links)
    request = plan_request(recipe, facts.model, cluster, owner_workers=owners)
    return make_plan(request), request, facts.steps


def _explained(plan: "Plan", request: "PlanRequest") -> str:
    from coterie.planner import explain  # noqa: PLC0415 - see cli.main

    return explain(plan, request)


def _measured(recipe: "Recipe", args: argparse.Namespace) -> "tuple[Plan, str, int]":
    """A plan for the workers that join."""
    from coterie import api  # noqa: PLC0415 - imports torch: seconds, and a wrong recipe should be told at once
    from coterie.cli.console import PlainConsole  # noqa: PLC0415

    planned = api.plan_run(recipe, PlainConsole(as_json=args.json))
    return planned.plan, planned.explanation, planned.steps


def _grid(plan: "Plan") -> str:
    from coterie.schedules import make_schedule, render  # noqa: PLC0415 - see cli.main

    in_flight = tuple(stage.in_flight for stage in plan.stages)
    return render(
        make_schedule(plan.schedule, stages=len(plan.stages), micro_batches=plan.micro_batches, in_flight=in_flight)
    )
