"""When each action of a schedule runs, given seconds per action and per transfer: a discrete-event simulation."""

from collections.abc import Sequence

import msgspec

from coterie.errors import ScheduleError
from coterie.schedules.actions import Action, Schedule


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage's actions, and of the link to the next stage (zeros for the last stage).

    Attributes:
        forward_s, backward_s: Per micro-batch.
        update_s: Per update.
        send_s: The link is busy so long with one micro-batch's hidden states.
        send_back_s: The same for the gradient on its way back from the next stage.
        latency_s: From the end of a transfer to its arrival, either way.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    send_s: float = 0.0
    send_back_s: float = 0.0
    latency_s: float = 0.0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """When things happened.

    Attributes:
        start_s, stop_s: Per stage and action, in the schedule's order.
        busy_s: Per stage: seconds spent computing.
        step_end_s: Per optimizer step: when the last stage to do so had applied it.
        end_s: When everything was done.
    """

    start_s: tuple[tuple[float, ...], ...]
    stop_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    step_end_s: tuple[float, ...]
    end_s: float

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Per stage: seconds not computing."""
        return tuple(self.end_s - busy for busy in self.busy_s)

    @property
    def steady_step_s(self) -> float:
        """Seconds per optimizer step while the pipeline is full: over the middle half of the steps."""
        steps = len(self.step_end_s)
        first, last = steps // 4, 3 * steps // 4
        if first == last:
            return self.step_end_s[-1] / steps
        return (self.step_end_s[last] - self.step_end_s[first]) / (last - first)


def simulate_times(schedule: Schedule, times: Sequence[StageTimes]) -> Timeline:
    """Run a checked schedule on virtual stages.

    Links transfer while stages compute, one transfer at a time in each direction. Updates of `flush` and `gpipe` start
    together, when every stage has finished the step's backwards (the stages add up their gradients' norm).

    Args:
        schedule: A schedule that `check` accepts.
        times: One per stage.

    Raises:
        ScheduleError: The schedule deadlocks, or the times are not one per stage.
    """
    if len(times) != schedule.stages:
        raise ScheduleError(f"{len(times)} stages' times for a schedule of {schedule.stages} stages")
    return _Simulation(schedule, times).run()


class _Simulation:
    def __init__(self, schedule: Schedule, times: Sequence[StageTimes]) -> None:
        stages = schedule.stages
        self.schedule = schedule
        self.times = times
        self.joint_updates = schedule.kind in {"flush", "gpipe"}
        self.free_s = [0.0] * stages
        self.link_free_s = [0.0] * stages
        self.link_back_free_s = [0.0] * stages
        # Arrival times in link order; the schedule's order on both ends is the same.
        self.hidden_at_s: list[list[float]] = [[] for _ in range(stages)]
        self.gradient_at_s: list[list[float]] = [[] for _ in range(stages)]
        self.taken = [[0, 0] for _ in range(stages)]
        self.step_done_s: list[list[float]] = [[] for _ in range(schedule.steps)]
        self.start_s: list[list[float]] = [[] for _ in range(stages)]
        self.stop_s: list[list[float]] = [[] for _ in range(stages)]

    def run(self) -> Timeline:
        position = [0] * self.schedule.stages
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(self.schedule.actions):
                while position[stage] < len(actions) and self._try(stage, actions[position[stage]]):
                    position[stage] += 1
                    moved = True
        if position != [len(actions) for actions in self.schedule.actions]:
            raise ScheduleError(f"the schedule deadlocks; its stages stop after {position} actions")
        return self._timeline()

    def _try(self, stage: int, action: Action) -> bool:
        """Run one action if its input is known; False if it is not yet."""
        ready_s = self._ready_s(stage, action)
        if ready_s is None:
            return False
        times = self.times[stage]
        seconds = {"F": times.forward_s, "B": times.backward_s, "U": times.update_s}[action.kind]
        start_s = max(self.free_s[stage], ready_s)
        stop_s = start_s + seconds
        self.free_s[stage] = stop_s
        self.start_s[stage].append(start_s)
        self.stop_s[stage].append(stop_s)
        if action.kind == "F":
            self._send_hidden(stage, stop_s)
        elif action.kind == "B":
            self._send_gradient(stage, stop_s)
            if action.micro_batch == self.schedule.micro_batches - 1:
                self.step_done_s[action.step].append(stop_s)
        return True

    def _ready_s(self, stage: int, action: Action) -> float | None:
        if action.kind == "U":
            if not self.joint_updates:
                return 0.0
            done = self.step_done_s[action.step]
            return max(done) if len(done) == self.schedule.stages else None
        forward = action.kind == "F"
        if stage == (0 if forward else self.schedule.stages - 1):
            return 0.0
        arrivals = (self.hidden_at_s if forward else self.gradient_at_s)[stage]
        taken = self.taken[stage]
        which = 0 if forward else 1
        if len(arrivals) <= taken[which]:
            return None
        taken[which] += 1
        return arrivals[taken[which] - 1]

    def _send_hidden(self, stage: int, at_s: float) -> None:
        if stage + 1 < self.schedule.stages:
            times = self.times[stage]
            self.link_free_s[stage] = max(self.link_free_s[stage], at_s) + times.send_s
            self.hidden_at_s[stage + 1].append(self.link_free_s[stage] + times.latency_s)

    def _send_gradient(self, stage: int, at_s: float) -> None:
        if stage > 0:
            times = self.times[stage - 1]
            self.link_back_free_s[stage] = max(self.link_back_free_s[stage], at_s) + times.send_back_s
            self.gradient_at_s[stage - 1].append(self.link_back_free_s[stage] + times.latency_s)

    def _timeline(self) -> Timeline:
        step_end_s = [0.0] * self.schedule.steps
        busy_s = [0.0] * self.schedule.stages
        for stage, actions in enumerate(self.schedule.actions):
            for action, start_s, stop_s in zip(actions, self.start_s[stage], self.stop_s[stage], strict=True):
                step_end_s[action.step] = max(step_end_s[action.step], stop_s)
                busy_s[stage] += stop_s - start_s
        return Timeline(
            start_s=tuple(map(tuple, self.start_s)),
            stop_s=tuple(map(tuple, self.stop_s)),
            busy_s=tuple(busy_s),
            step_end_s=tuple(step_end_s),
            end_s=max(self.free_s),
        )
