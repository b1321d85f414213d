"""A device slowed to a third in mid-run: how fast is the run 30 steps later, against the best plan for that device?"""

import statistics
from pathlib import Path

from faults_setting import LONGEST_S, Setting, last_words
from reporting import Report
from testbed import Bed, HostSettings, wait_for
from testbed.programs import CoordinatorProgram

SPEED = 0.3
SLOWED = "laptop"
NAMES = ("phone", SLOWED, "tablet")
SLOW_STEP = 14
"""After the first look at running times, so that what follows is drift."""
WITHIN_STEPS = 30
WINDOW_STEPS = 12
QUICK_WITHIN_STEPS = 20
WARM_STEPS = 3


def rebalance(report: Report, folder: Path, *, quick: bool) -> None:
    """One run with the device slow from the beginning, and one in which it becomes slow."""
    within = QUICK_WITHIN_STEPS if quick else WITHIN_STEPS
    setting = Setting(folder, steps=SLOW_STEP + within + WINDOW_STEPS, shape="deep", tokens=32)
    with setting.bed("slow-from-the-beginning") as bed:
        run = _begin(bed, setting, SPEED / 3)
        _end(run)
        plan = run.events.of("plan")[-1]
        optimal_s, measured_s = plan["predicted_step_s"], _median(run, WARM_STEPS, None)
    with setting.bed("slowed") as bed:
        run = _begin(bed, setting, SPEED)
        wait_for(
            "the moment to slow a device",
            lambda: run.events.steps() >= SLOW_STEP,
            timeout_s=LONGEST_S,
            alive=lambda: run.runs,
        )
        means = bed.hosts[SLOWED].slow_down(SPEED / 3)
        slowed_at = run.events.steps()
        _end(run)
        before_s = _median(run, WARM_STEPS, slowed_at)
        after_s = _median(run, slowed_at + within, None)
        worst_s = _median(run, slowed_at + 1, slowed_at + 6)
        weighed = run.events.of("rebalance")
        plans = [_cut(plan) for plan in run.events.of("plan")]
    setting.close()
    report.table(
        f"{SLOWED} slowed to a third ({means})",
        ("seconds a step", "s"),
        (
            ("before", before_s),
            ("just after", worst_s),
            (f"after {within} steps", after_s),
            ("planner's optimum for a device that was slow from the beginning", optimal_s),
            ("measured then", measured_s),
        ),
    )
    for record in weighed:
        report.note(f"step {record['step']}: {record['reason']}")
    report.note("plans: " + "; ".join(plans))
    report.figure("rebalanced_throughput", optimal_s / after_s, at_least=0.85)
    report.figure("rebalanced_throughput_measured", measured_s / after_s)


def _begin(bed: Bed, setting: Setting, slowed: float) -> CoordinatorProgram:
    speeds = {name: slowed if name == SLOWED else SPEED for name in NAMES}
    return bed.begin(
        setting.words("flush", workers=1), [HostSettings(name=name, speed=speed) for name, speed in speeds.items()]
    )


def _end(run: CoordinatorProgram) -> None:
    if run.wait(LONGEST_S):
        raise RuntimeError(f"a run for its speed did not end well: {last_words(run.log)}")
    run.events.look()


def _median(run: CoordinatorProgram, first: int, stop: int | None) -> float:
    by_step: dict[int, float] = {record["step"]: record["seconds"] for record in run.events.of("step")}
    return statistics.median([by_step[step] for step in sorted(by_step)][first:stop])


def _cut(plan: dict[str, object]) -> str:
    stages = plan["stages"]
    assert isinstance(stages, list)
    return ", ".join(f"{stage['worker']} {stage['first_unit']}-{stage['stop_unit'] - 1}" for stage in stages)
