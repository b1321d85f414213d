"""Side-tuning killed 20 times, at random moments of both phases: does it finish, with the same side network?"""

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from made_up import SHAPES, make_data, make_model
from reporting import Report, parse_arguments

KILLS, QUICK_KILLS = 20, 2
WHO = ("device", "server", "device and server", "everybody")
EPOCHS, ROWS, BATCH_ROWS = 12, 64, 4
MOST_KILLS = 5
POLL_S = 0.02
LONGEST_S = 1800.0


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    report = Report("side_kills", "MiniLM's shape cut to 2 blocks, one slowed device, one slowed server", arguments)
    SHAPES["tiny"] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = _command(make_model(folder / "model", "tiny"), make_data(folder / "train.jsonl", ROWS, 16))
        _run(words, folder / "unharmed")
        kills: list[tuple[str, str, int, int]] = []
        unequal = runs = 0
        while len(kills) < (QUICK_KILLS if arguments.quick else KILLS):
            run, runs = folder / f"run-{runs}", runs + 1
            kills += _killed_run(words, run, draw)
            unequal += _unequal(folder / "unharmed", run)
    report.table("kills", ("killed", "phase", "after steps", "resumed at"), kills)
    report.figure("kills", len(kills))
    report.figure("runs", runs)
    report.figure("kills_while_collecting", sum(phase == "collect" for _, phase, _, _ in kills))
    report.figure("tensors_that_differ", unequal, at_most=0)
    report.finish()


def _command(model: Path, data: Path) -> list[str]:
    words = [sys.executable, "-m", "coterie", "train", "--mode", "side", "--model", str(model), "--train", str(data)]
    words += ["--epochs", str(EPOCHS), "--batch-rows", str(BATCH_ROWS), "--micro-batches", "2", "--side-rank", "8"]
    words += [
        "--learning-rate",
        "1e-3",
        "--checkpoint-every",
        "5",
        "--heartbeat-s",
        "0.5",
        "--heartbeat-timeout-s",
        "120",
    ]
    words += ["--local-worker", "name=device,speed=0.1", "--local-worker", "name=server,role=server,speed=0.2"]
    return words


def _run(words: list[str], run: Path) -> None:
    """A run to its end."""
    subprocess.run([*words, "--output", str(run)], check=True, stdout=subprocess.DEVNULL, timeout=LONGEST_S)


def _killed_run(words: list[str], run: Path, draw: random.Random) -> list[tuple[str, str, int, int]]:
    """A run that is killed up to `MOST_KILLS` times and then left to end; its kills."""
    kills = []
    while len(kills) < MOST_KILLS and not (run / "model").exists():
        killed = _kill(words, run, draw)
        if not (run / "model").exists():  # else it was done before
            kills.append(killed)
    if not (run / "model").exists():
        _run([*words, "--resume"], run)
    return kills


def _kill(words: list[str], run: Path, draw: random.Random) -> tuple[str, str, int, int]:
    """Begin or resume a run and kill somebody; who, in which phase, and how far the run was."""
    resume = ["--resume"] if (run / "side-run.json").exists() else []
    steps_per_epoch, starts = ROWS // BATCH_ROWS, len(_records(run, "start"))
    # The first two of a run while it collects, from before its first step on; the others anywhere.
    longest = 2 * steps_per_epoch if starts > 1 else steps_per_epoch // 2
    who, patience = draw.choice(WHO), draw.randint(0, longest)
    process = subprocess.Popen(
        [*words, *resume, "--output", str(run)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    before = len(_records(run, "step"))
    deadline_s = time.monotonic() + LONGEST_S
    while process.poll() is None and (
        len(_records(run, "start")) == starts or len(_records(run, "step")) - before < patience
    ):
        if time.monotonic() > deadline_s:
            raise RuntimeError("the run does not go on")
        time.sleep(POLL_S)
    time.sleep(draw.random() * 0.2)
    _strike(process, who)
    done = max((step["step"] + 1 for step in _records(run, "step")[before:]), default=None)
    first = _records(run, "start")[-1]["first_step"]
    reached = first if done is None else done
    return who, "collect" if reached < steps_per_epoch else "replay", reached, first


def _strike(process: "subprocess.Popen[bytes]", who: str) -> None:
    """Kill, and wait until nobody is left: workers whose coordinator was killed leave by themselves."""
    names = {"device": ("device",), "server": ("server",)}.get(who, ("device", "server"))
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children()
    for child in children:
        with contextlib.suppress(psutil.Error):
            if any(f"--name={name}" in child.cmdline() for name in names):
                child.kill()
    if who == "everybody":
        process.kill()
    process.wait(60)
    psutil.wait_procs(children, 60)


def _records(run: Path, kind: str) -> list[dict[str, int]]:
    path = run / "events.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def _unequal(one: Path, other: Path) -> int:
    """How many tensors of two runs differ in any bit."""
    count = 0
    for part in ("side_network", "task_layers"):
        there = load_file(one / "model" / f"{part}.safetensors")
        here = load_file(other / "model" / f"{part}.safetensors")
        count += sum(not torch.equal(tensor, here[name]) for name, tensor in there.items())
    return count


if __name__ == "__main__":
    main()
