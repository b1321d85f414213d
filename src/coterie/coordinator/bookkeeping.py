"""Turns what workers report into records: steps, memory, evaluations, and the summary at the end."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from coterie.clock import Clock
from coterie.cluster.messages import StageReady, StepDone
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.ledger import StepEntry
from coterie.coordinator.member import Member
from coterie.errors import BackendError
from coterie.ids import WorkerId
from coterie.metrics.fault_records import EnergyRecord, MembershipRecord, RebalanceRecord, RecoveryRecord
from coterie.metrics.records import (
    AnyRecord,
    DeviceSummary,
    EvaluationRecord,
    FaultRecord,
    LinkSummary,
    MemoryRecord,
    PlanRecord,
    StepRecord,
    SummaryRecord,
    WorkerStep,
)
from coterie.planner.plan import Plan, StageAssignment
from coterie.units import name_units

_Change = TypeVar("_Change", RecoveryRecord, RebalanceRecord)

LAST_STEPS = 10
"""So many say how fast a run is now."""

MOST_CHANGES = 200
"""Recoveries, and moves of layers, that a summary lists at most: the last ones. The event log has all."""


class Bookkeeper:
    """Keeps what the summary needs and hands every record to `write`."""

    def __init__(
        self, job: Job, plan: Plan, feeder: TrainingFeeder, write: Callable[[AnyRecord], None], clock: Clock
    ) -> None:
        self._job = job
        self._plan = plan
        """The one in effect."""
        self._last_stages: dict[WorkerId, tuple[StageAssignment, Plan]] = {}
        self._codecs: dict[tuple[WorkerId, WorkerId], str] = {}
        self._note_plan(plan)
        self._feeder = feeder
        self._write = write
        self._clock = clock
        self._since_s = clock.now()
        self._rss: dict[WorkerId, int] = {}
        self._peaks: dict[WorkerId, int] = {}
        self._sent: dict[WorkerId, tuple[int, int]] = {}
        self._sent_before: dict[tuple[WorkerId, WorkerId], tuple[int, int]] = {}
        self._busy_s: dict[WorkerId, float] = {}
        self._backend_busy_s: dict[WorkerId, dict[str, float]] = {}
        self._backends_left_out: dict[WorkerId, dict[str, str]] = {}
        self._step_seconds: list[float] = []
        self._lost_seconds = 0.0
        self._first_step: int | None = None
        self._tokens = 0
        self.losses: list[float] = []
        self.link_paths: dict[WorkerId, str] = {}
        self.evaluations: dict[str, EvaluationRecord] = {}
        self.recoveries: deque[RecoveryRecord] = deque(maxlen=MOST_CHANGES)
        self.rebalances: deque[RebalanceRecord] = deque(maxlen=MOST_CHANGES)
        self._unlisted = 0
        self.energy: dict[WorkerId, EnergyRecord] = {}

    def _note_plan(self, plan: Plan) -> None:
        """From now on this is the plan."""
        self._plan = plan
        self._last_stages |= {stage.worker: (stage, plan) for stage in plan.stages}
        self._codecs |= {(stage.worker, after.worker): stage.send_codec for stage, after in pairwise(plan.stages)}

    @property
    def step_s(self) -> float:
        """Mean seconds of the last steps; 0 before the first one."""
        return statistics.fmean(self._step_seconds[-LAST_STEPS:] or [0.0])

    def stages_stand(self, ready: Mapping[WorkerId, StageReady]) -> None:
        """Note what the workers said when their stages were built."""
        self.link_paths |= {worker: message.link_to_next for worker, message in ready.items()}

    def planned(self, plan: Plan) -> None:
        """Another plan takes effect: stages count what they send from nothing again."""
        for pair, sent in self._sent_by_pair().items():
            before = self._sent_before.get(pair, (0, 0))
            self._sent_before[pair] = (before[0] + sent[0], before[1] + sent[1])
        self._sent.clear()
        self._note_plan(plan)
        self._write(PlanRecord.of(plan))

    def rewind(self, step: int) -> int:
        """Training goes on from `step`: what was done from there on is done again, and counts once. How many steps."""
        if self._first_step is None:
            return 0
        kept = max(step - self._first_step, 0)
        again = len(self.losses) - kept
        if again > 0:
            self._tokens -= sum(self._feeder.tokens(step + number) for number in range(again))
            self._lost_seconds += sum(self._step_seconds[kept:])
            del self.losses[kept:], self._step_seconds[kept:]
        return max(again, 0)

    def took(self, record: MembershipRecord | RecoveryRecord | RebalanceRecord) -> None:
        """Note what was done about devices that come, go or change."""
        if isinstance(record, RecoveryRecord):
            self._list(self.recoveries, record)
        elif isinstance(record, RebalanceRecord) and record.worth:
            self._list(self.rebalances, record)
        self._write(record)

    def _list(self, listed: "deque[_Change]", record: "_Change") -> None:
        """In a run of days with a device that comes and goes the oldest are listed no more."""
        self._unlisted += len(listed) == listed.maxlen
        listed.append(record)

    def training_begins(self) -> None:
        """Restart the stopwatch: setting up, an evaluation or a checkpoint is no part of the next step's time."""
        self._since_s = self._clock.now()

    def heartbeat(self, member: Member) -> None:
        """Note a worker's memory."""
        self._rss[member.worker] = member.rss_bytes
        limit = next((stage.memory_limit for stage in self._plan.stages if stage.worker == member.worker), 0)
        peak = self._peaks.get(member.worker, 0)
        self._write(
            MemoryRecord(worker=member.worker, memory_bytes=member.rss_bytes, limit_bytes=limit, peak_bytes=peak)
        )
        self._note_energy(member)

    def _note_energy(self, member: Member) -> None:
        """Keep what a device has drawn; it is written down with the summary."""
        drawn = energy_of(member)
        if drawn is not None:
            self.energy[member.worker] = drawn

    def step(self, step: int, entry: StepEntry) -> None:
        """Note a finished optimizer step."""
        now_s = self._clock.now()
        seconds, self._since_s = now_s - self._since_s, now_s
        in_plan_order = [(stage.worker, entry.done[stage.worker]) for stage in self._plan.stages]
        for worker, done in in_plan_order:
            self._peaks[worker] = max(self._peaks.get(worker, 0), done.peak_bytes)
            self._sent[worker] = (done.sent_next_bytes, done.sent_previous_bytes)
            busy_s = done.forward_s + done.backward_s + done.update_s
            self._busy_s[worker] = self._busy_s.get(worker, 0.0) + busy_s
            self._note_backends(step, worker, done)
        if self._first_step is None:
            self._first_step = step
        self._step_seconds.append(seconds)
        self.losses.append(entry.loss)
        self._tokens += self._feeder.tokens(step)
        last = entry.done[self._plan.stages[-1].worker]
        self._write(
            StepRecord(
                step=step,
                epoch=self._feeder.rows(step).epoch,
                loss=entry.loss,
                tokens=self._feeder.tokens(step),
                loss_tokens=sum(entry.loss_tokens.values()),
                seconds=seconds,
                learning_rate=last.learning_rate,
                grad_norm=last.grad_norm if last.grad_norm_is_global else None,
                workers=tuple(
                    WorkerStep(
                        worker=worker,
                        utilization=min((done.forward_s + done.backward_s + done.update_s) / max(seconds, 1e-9), 1.0),
                        memory_bytes=self._rss.get(worker, 0),
                        peak_bytes=self._peaks[worker],
                        backends=_parts_of(done.backend_busy_s, seconds),
                    )
                    for worker, done in in_plan_order
                ),
            )
        )

    def _note_backends(self, step: int, worker: WorkerId, done: StepDone) -> None:
        """Add up what a device's backends did; write down which of them failed."""
        busy = self._backend_busy_s.setdefault(worker, {})
        for name, busy_s in done.backend_busy_s.items():
            busy[name] = busy.get(name, 0.0) + busy_s
        for name, reason in done.backends_left_out.items():
            self._backends_left_out.setdefault(worker, {})[name] = reason
            message = f"the backend {name} is left out from now on: {reason}"
            self._write(FaultRecord(slug=BackendError.slug, message=message, worker=worker, step=step))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Note an evaluation; the last one of each split goes into the summary."""
        self.evaluations[record.split] = record
        self._write(record)

    def summary(self, output: str) -> SummaryRecord:
        """The run in figures, so far."""
        steps = len(self._step_seconds)
        seconds = sum(self._step_seconds) + self._lost_seconds
        return SummaryRecord(
            model=self._job.source.name,
            method=self._job.recipe.train.method,
            schedule=self._plan.schedule,
            steps=steps,
            epochs=-(-steps // self._job.steps_per_epoch),
            seconds=seconds,
            tokens=self._tokens,
            first_loss=self.losses[0] if self.losses else None,
            last_loss=self.losses[-1] if self.losses else None,
            predicted_step_s=self._plan.predicted_step_s,
            measured_step_s=usual_step_s(self._step_seconds),
            one_device_step_s=self._plan.one_device_step_s,
            one_device_peak_bytes=self._plan.one_device_peak,
            devices=tuple(self._device(stage, plan, seconds) for stage, plan in self._stages()),
            links=self._links(),
            quality=tuple(self.evaluations.values()),
            output=output,
            counts=self._counts(),
            first_step=self._first_step or 0,
            recoveries=tuple(self.recoveries),
            rebalances=tuple(self.rebalances),
            energy=tuple(self.energy.values()),
        )

    def _stages(self) -> list[tuple[StageAssignment, Plan]]:
        """The stages of the plan in effect, and the last one of each device that had one before and has none now."""
        now = [stage.worker for stage in self._plan.stages]
        return [self._last_stages[worker] for worker in dict.fromkeys((*now, *self._last_stages))]

    def _device(self, stage: StageAssignment, plan: Plan, seconds: float) -> DeviceSummary:
        return DeviceSummary(
            worker=stage.worker,
            device_name=stage.device_name,
            units=name_units(stage.first_unit, stage.stop_unit, plan.units),
            predicted_peak_bytes=stage.memory.total,
            measured_peak_bytes=self._peaks.get(stage.worker, 0),
            limit_bytes=stage.memory_limit,
            base_bytes=stage.memory.base,
            utilization=min(self._busy_s.get(stage.worker, 0.0) / max(seconds, 1e-9), 1.0),
            backends=_parts_of(self._backend_busy_s.get(stage.worker, {}), seconds),
            backends_left_out=self._backends_left_out.get(stage.worker, {}),
        )

    def _sent_by_pair(self) -> dict[tuple[WorkerId, WorkerId], tuple[int, int]]:
        """Tensor bytes between neighbours under the plan in effect, forward and backward, as the senders counted."""
        return {
            (stage.worker, after.worker): (
                self._sent.get(stage.worker, (0, 0))[0],
                self._sent.get(after.worker, (0, 0))[1],
            )
            for stage, after in pairwise(self._plan.stages)
        }

    def _links(self) -> tuple[LinkSummary, ...]:
        """Tensor bytes between those that are or were neighbours."""
        now = self._sent_by_pair()
        pairs = dict.fromkeys((*now, *self._sent_before))
        found = []
        for source, target in pairs:
            sent, before = now.get((source, target), (0, 0)), self._sent_before.get((source, target), (0, 0))
            found.append(
                LinkSummary(
                    source=source,
                    target=target,
                    forward_bytes=sent[0] + before[0],
                    backward_bytes=sent[1] + before[1],
                    codec=self._codecs[source, target],
                    path=self.link_paths.get(source, ""),
                )
            )
        return tuple(found)

    def _counts(self) -> dict[str, int]:
        summary = self._job.splits["train"].summary
        counts = {
            "training rows cut to the context": summary.truncated_rows,
            "training rows without a label skipped": summary.skipped_rows,
            "earlier losses and moves, in the event log only": self._unlisted,
        }
        return {name: count for name, count in counts.items() if count}


def usual_step_s(step_seconds: Sequence[float]) -> float:
    """Mean seconds of a step without the first, which also waits for caches and page faults; 0 before the first."""
    return statistics.fmean(step_seconds[1:] or step_seconds or [0.0])


def energy_of(member: Member) -> EnergyRecord | None:
    """What a device has drawn as far as it says; None if it says nothing."""
    vitals = member.vitals
    if vitals is None or vitals.joules is None or not math.isfinite(vitals.joules):
        return None  # JSON has no such number: the run's events could not be read again
    return EnergyRecord(
        worker=member.worker,
        device_name=member.hello.name,
        joules=vitals.joules,
        source=vitals.watts_source,
        watts=vitals.watts,
        battery=vitals.battery,
    )


def _parts_of(busy_s: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Busy seconds as parts of a time, 0 to 1."""
    return {name: min(busy / max(seconds, 1e-9), 1.0) for name, busy in busy_s.items()}


def summary_json(summary: SummaryRecord) -> bytes:
    """The summary as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(summary))
