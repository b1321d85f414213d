"""A schedule as a grid that a terminal can show: one row per stage, one column per slot of time."""

from coterie.schedules.actions import Schedule
from coterie.schedules.timeline import StageTimes, simulate_times


def render(schedule: Schedule, *, width: int = 120, max_slots: int = 200) -> str:
    """Draw who does what when, with every forward, backward and update one slot long.

    Micro-batches are numbered through the segment: `F5` is the forward of micro-batch 5 - 4 = 1 of step 1 when a step
    has 4. `U` is an update, `.` an idle slot.

    Args:
        schedule: A schedule that `check` accepts.
        width: Characters per line; longer schedules go on below.
        max_slots: Slots drawn; the rest is named, not drawn.
    """
    timeline = simulate_times(schedule, [StageTimes(forward_s=1, backward_s=1, update_s=1)] * schedule.stages)
    slots = round(timeline.end_s)
    cell = len(str(schedule.steps * schedule.micro_batches - 1)) + 2
    rows = [["."] * slots for _ in range(schedule.stages)]
    for row, actions, starts in zip(rows, schedule.actions, timeline.start_s, strict=True):
        for action, start in zip(actions, starts, strict=True):
            index = action.step * schedule.micro_batches + action.micro_batch
            row[round(start)] = "U" if action.kind == "U" else f"{action.kind}{index}"
    label = len(f"stage {schedule.stages - 1} ")
    shown = min(slots, max_slots)
    per_line = max((width - label) // cell, 1)
    lines = [f"{schedule.kind}: {schedule.stages} stages, {schedule.steps} x {schedule.micro_batches} micro-batches"]
    for first in range(0, shown, per_line):
        stop = min(first + per_line, shown)
        lines += ["", (" " * label + "".join(f"{slot:<{cell}}" for slot in range(first, stop))).rstrip()]
        for stage, row in enumerate(rows):
            cells = "".join(f"{text:<{cell}}" for text in row[first:stop])
            lines.append(f"{f'stage {stage}':<{label}}{cells}".rstrip())
    if shown < slots:
        lines += ["", f"... {slots - shown} more slots"]
    return "\n".join(lines)
