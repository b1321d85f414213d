"""What the fault benchmarks train: a tiny BERT with random weights, and how a run of it is begun and read."""

import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from made_up import SHAPES, make_data, make_model
from testbed import Bed, Events, HostSettings, Nursery
from testbed.events import Record
from testbed.faults import Fault
from testbed.host import Host

TOKENS, ROWS, BATCH_ROWS, MICRO_BATCHES = 64, 64, 8, 4
OWN_SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 128},
    "deep": {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 1024},
}
TAIL_STEPS = 10
"""The last steps, whose mean is a run's final loss."""
LONGEST_S = 900.0
POLL_S = 0.02
SOON_S = 2.0
"""A fault that the run feels at once makes it pause within this time."""
LATEST_S = 60.0
"""What happens later has another cause."""
NAMES = ("phone", "laptop", "tablet")


class Setting:
    """A folder with a model and data, and the process that all programs are forked from."""

    def __init__(
        self, folder: Path, *, steps: int, method: str = "lora", shape: str = "tiny", tokens: int = TOKENS
    ) -> None:
        SHAPES.update(OWN_SHAPES)
        self.folder = folder
        self.steps = steps
        self.method = method
        self.nursery = Nursery()
        self._model = make_model(folder / "model", shape)
        self._data = make_data(folder / "train.jsonl", ROWS, tokens)

    def words(self, schedule: str, *, seed: int = 0, workers: int = len(NAMES)) -> list[str]:
        """The flags of `coterie train`."""
        epochs = -(-self.steps * BATCH_ROWS // ROWS)
        flags: dict[str, object] = {
            "model": self._model,
            "train": self._data,
            "method": self.method,
            "schedule": schedule,
            "seed": seed,
            "epochs": epochs,
            "max-steps": self.steps,
            "batch-rows": BATCH_ROWS,
            "micro-batches": MICRO_BATCHES,
            "learning-rate": 1e-3,
            "min-workers": workers,
        }
        return [
            "--no-evaluate-every-epoch",
            *(str(word) for name, value in flags.items() for word in (f"--{name}", value)),
        ]

    def bed(self, name: str) -> Bed:
        """A test bed in a folder of its own; what an earlier one kept there is removed."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return Bed(self.folder / name, nursery=self.nursery, caches=self.folder / "caches")

    def close(self) -> None:
        """End what it started."""
        self.nursery.close()


def hosts(names: Iterable[str] = NAMES) -> list[HostSettings]:
    """Devices with a battery."""
    return [HostSettings(name=name, battery="90%") for name in names]


def undisturbed(setting: Setting, schedule: str, seed: int = 0) -> Path:
    """A run that nothing happens to; its folder."""
    with setting.bed(f"undisturbed-{schedule}-{seed}") as bed:
        run = bed.begin(setting.words(schedule, seed=seed), hosts())
        code = run.wait(LONGEST_S)
        if code:
            raise RuntimeError(f"the undisturbed run ended with code {code}; see {run.log}")
        return run.output


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """What one fault did to a run.

    Attributes:
        at_s: When it happened (seconds since 1970).
        next_step_s: From then to the end of the first step that the run did afterwards, in whatever plan.
        noticed_s: From the last sign of life to the notice, where a worker was lost.
        replayed_steps: Steps that were done once more.
    """

    at_s: float
    next_step_s: float | None = None
    noticed_s: float | None = None
    replayed_steps: int = 0


def strike(fault: Fault, bed: Bed, host: Host) -> float:
    """Let a fault happen; when it did."""
    at_s = time.time()
    fault.strike(bed, host)
    return at_s


def what_happened(events: Events, at_s: float, worker: str) -> Struck:
    """Read from a run's records what a fault at this time led to.

    The next step is the first under the plan that a recovery made, or of a coordinator that was started again. If the
    run lost nobody, it is the step that ends the longest pause that began by then: a hand-over, or a slow link.
    """
    records = events.look()
    later = [record for record in records if record["at_s"] > at_s]
    ends = [at_s, *(record["at_s"] for record in later if record["type"] == "step")]
    starts = [record["at_s"] for record in later if record["type"] == "start"]
    recoveries = [record for record in later if record["type"] == "recovery" and record["worker"] == worker]
    soon = [place for place in range(1, len(ends)) if ends[place - 1] <= at_s + SOON_S]
    if recoveries and recoveries[0]["at_s"] < at_s + LATEST_S:
        plan = [record["at_s"] for record in later if record.get("version") == recoveries[0]["plan_version"]]
        next_s = min((end for end in ends[1:] if end > plan[0]), default=None) if plan else None
        struck = Struck(at_s=at_s, noticed_s=recoveries[0]["noticed_s"], replayed_steps=recoveries[0]["replayed_steps"])
    elif starts and starts[0] < at_s + LATEST_S:
        next_s = min((end for end in ends[1:] if end > starts[0]), default=None)
        struck = Struck(at_s=at_s, replayed_steps=_replayed(records, starts[0]))
    else:
        longest = max(soon, key=lambda place: ends[place] - ends[place - 1], default=None)
        next_s, struck = None if longest is None else ends[longest], Struck(at_s=at_s)
    return msgspec.structs.replace(struck, next_step_s=None if next_s is None else next_s - at_s)


def _replayed(records: list[Record], start_s: float) -> int:
    """Steps that were recorded before a start and again after it."""
    steps = [record for record in records if record["type"] == "step"]
    before = {record["step"] for record in steps if record["at_s"] < start_s}
    return len(before & {record["step"] for record in steps if record["at_s"] > start_s})


def trained_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model or adapter that a run exported."""
    files = sorted((run / "model").rglob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def unequal(one: Path, other: Path) -> int:
    """How many tensors of two runs differ in any bit, or are in one of them only."""
    here, there = trained_tensors(one), trained_tensors(other)
    if not here:
        raise RuntimeError(f"{one} holds no model")
    common = here.keys() & there.keys()
    return len(here.keys() ^ there.keys()) + sum(not torch.equal(here[name], there[name]) for name in common)


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference of any element, against the largest element of its tensor."""
    here, there = trained_tensors(one), trained_tensors(other)
    return max(float((here[name] - there[name]).abs().max() / here[name].abs().max().clamp(min=1e-30)) for name in here)


def final_loss(losses: list[float]) -> float:
    """Of the last steps."""
    return statistics.fmean(losses[-TAIL_STEPS:])


def losses_of(run: Path) -> list[float]:
    """A run's losses by step, replayed ones once."""
    return Events(run).losses()


def last_words(log: Path, lines: int = 3) -> str:
    """The end of a program's output, in one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return " / ".join(text.strip().splitlines()[-lines:])[-300:]
