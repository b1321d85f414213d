"""Where a run may pause: steps cut into segments at checkpoints and at the ends of epochs."""

import msgspec

from coterie.schedules.actions import ScheduleKind


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Steps [first_step, stop_step), run without emptying the pipeline where the schedule allows it."""

    first_step: int
    stop_step: int

    @property
    def steps(self) -> int:
        """How many optimizer steps."""
        return self.stop_step - self.first_step


def boundaries(first_step: int, total_steps: int, *, steps_per_epoch: int, checkpoint_every: int) -> tuple[int, ...]:
    """Steps before which the pipeline is empty: each checkpoint, each epoch's end, and the end.

    They do not depend on where a run resumes, since `stash` and `2bw` give other numbers after another boundary.
    """
    points = {total_steps}
    points.update(range(steps_per_epoch, total_steps, steps_per_epoch))
    if checkpoint_every:
        points.update(range(checkpoint_every, total_steps, checkpoint_every))
    return tuple(sorted(point for point in points if point > first_step))


def cut_segments(kind: ScheduleKind, first_step: int, stop_step: int) -> tuple[Segment, ...]:
    """The segments up to the next boundary.

    `flush` and `gpipe` empty the pipeline after every step anyway, so each step is a segment and a run can stop after
    any of them; the workers have the next segments queued and lose no time.
    """
    if kind in ("flush", "gpipe"):
        return tuple(Segment(first_step=step, stop_step=step + 1) for step in range(first_step, stop_step))
    return (Segment(first_step=first_step, stop_step=stop_step),)
