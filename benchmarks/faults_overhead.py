"""What replicas and heartbeats cost a LoRA run that nothing happens to: with and without them, in turns."""

import statistics
import time
from pathlib import Path

import msgspec
import psutil

from faults_setting import LONGEST_S, POLL_S, Setting, last_words
from reporting import Report
from testbed import HostSettings

NAMES = ("phone", "laptop", "tablet")
SPEED = 0.25
"""Of a core, each: together less than one, so that a busy machine slows nobody."""
PAIRS, QUICK_PAIRS = 3, 1
STEPS, QUICK_STEPS = 24, 10
WARM_STEPS = 4
NEVER = 10**6
WITHOUT = ["--replicate-every", str(NEVER), "--heartbeat-s", "60", "--heartbeat-timeout-s", "600"]
WITH = ["--replicate-every", "1", "--heartbeat-s", "1"]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the median step, and processor seconds of all processes per step."""

    step_s: float
    cpu_s: float


def measure_overhead(report: Report, folder: Path, *, quick: bool) -> None:
    """Alternate runs with and without; the shape of MiniLM unless quick."""
    setting = Setting(
        folder, steps=QUICK_STEPS if quick else STEPS, shape="tiny" if quick else "minilm", tokens=64 if quick else 32
    )
    rows: list[tuple[object, ...]] = []
    walls, cpus = [], []
    for pair in range(QUICK_PAIRS if quick else PAIRS):
        kinds = (("with", WITH), ("without", WITHOUT))
        found = {name: _run(setting, f"{name}-{pair}", words) for name, words in (kinds if pair % 2 else kinds[::-1])}
        there, none = found["with"], found["without"]
        walls.append(there.step_s / none.step_s - 1)
        cpus.append(there.cpu_s / none.cpu_s - 1)
        rows.append((pair, there.step_s, none.step_s, f"{walls[-1]:+.1%}", there.cpu_s, none.cpu_s, f"{cpus[-1]:+.1%}"))
    setting.close()
    report.table(
        "replicas and heartbeats",
        ("pair", "step s with", "without", "more", "CPU s a step with", "without", "more"),
        rows,
    )
    report.figure("replication_overhead", statistics.median(walls), at_most=0.03)
    report.figure("replication_cpu_overhead", statistics.median(cpus))


def _run(setting: Setting, name: str, words: list[str]) -> Cost:
    with setting.bed(name) as bed:
        run = bed.begin(
            [*setting.words("flush"), *words, "--no-rebalance"],
            [HostSettings(name=name, speed=SPEED) for name in NAMES],
        )
        deadline_s = time.monotonic() + LONGEST_S
        first = last = (0, 0.0)
        while run.runs and time.monotonic() < deadline_s:
            steps = run.events.steps()
            if steps > last[0]:
                last = (steps, _cpu_s([run.pid, *(host.pid for host in bed.hosts.values())]))
                first = first if first[0] >= WARM_STEPS else last
            time.sleep(POLL_S)
        if run.exit_code or last[0] <= first[0]:
            raise RuntimeError(f"a run for its speed did not end well: {last_words(run.log)}")
        seconds = [record["seconds"] for record in run.events.of("step")[WARM_STEPS:]]
        return Cost(step_s=statistics.median(seconds), cpu_s=(last[1] - first[1]) / (last[0] - first[0]))


def _cpu_s(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total
