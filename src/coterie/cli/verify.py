"""`coterie verify`: was the run's loss curve that of one device? Repeats its first steps alone, in plain PyTorch."""

import argparse
from pathlib import Path

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.errors import CheckpointError, UsageError

SAME = 1e-4
"""Relative difference of losses up to which two curves count as the same: float32 sums in another order drift."""


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "verify",
        help="compare a run's losses with one device's",
        description="Repeat the first steps of a run on this machine alone, uncut, in plain PyTorch, and compare the\n"
        "losses. Exit code 1 if they differ.",
    )
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--steps", type=int, default=30, help="how many steps (default 30)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1, as local workers have)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Repeat and compare."""
    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}", hint="compare at least one step")
    from coterie.config.loading import load_recipe  # noqa: PLC0415 - see cli.main

    recipe_file = args.folder / "recipe.toml"
    if not recipe_file.is_file():
        raise CheckpointError(
            f"{args.folder} is not the folder of a run: it has no recipe.toml",
            hint="give the folder of a run, such as runs/latest",
        )
    recipe = load_recipe(recipe_file)
    import torch  # noqa: PLC0415 - seconds to import, after the recipe has been checked

    from coterie.coordinator.job import prepare_job  # noqa: PLC0415
    from coterie.coordinator.one_device import largest_difference, run_on_one_device  # noqa: PLC0415
    from coterie.coordinator.side_here import run_side_here  # noqa: PLC0415
    from coterie.ids import RunId  # noqa: PLC0415
    from coterie.metrics.events import read_events, valid_steps  # noqa: PLC0415
    from coterie.metrics.records import PlanRecord  # noqa: PLC0415 - as above

    events = read_events(args.folder / "events.jsonl")
    plans = [record for record in events if isinstance(record, PlanRecord)]
    recorded = tuple(record.loss or 0.0 for record in valid_steps(events))[: args.steps]
    if not plans or not recorded:
        raise CheckpointError(f"{args.folder} has recorded no steps to compare with", hint="train first")
    torch.set_num_threads(args.threads)
    job = prepare_job(recipe, RunId("verify"), lambda _text: None)
    repeat = run_side_here if recipe.train.mode == "side" else run_on_one_device
    alone = repeat(job, plans[-1].micro_batches, len(recorded))
    difference = largest_difference(recorded, alone.losses)
    same = difference <= SAME
    if args.json:
        print_json({"same": same, "steps": len(recorded), "largest_difference": difference, "one_device": alone})
    else:
        for step, (here, there) in enumerate(zip(recorded, alone.losses, strict=True)):
            print(f"  step {step + 1:3d}   run {here:.6f}   one device {there:.6f}")
        print(f"same loss curve as one device: {'yes' if same else 'NO'} ", end="")
        print(f"({len(recorded)} steps, largest relative difference {difference:.1e})")
    return 0 if same else 1
