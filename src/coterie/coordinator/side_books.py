"""Turns what devices and server of a side-tuning run report into records, and into the figures of its summary."""

from collections.abc import Callable
from itertools import pairwise

from coterie.clock import Clock
from coterie.cluster.messages import StepDone
from coterie.cluster.side_messages import BatchStored, StageForwarded
from coterie.coordinator.bookkeeping import energy_of, usual_step_s
from coterie.coordinator.feeders import TrainingFeeder
from coterie.coordinator.job import Job
from coterie.coordinator.ledger import StepEntry
from coterie.coordinator.member import Member
from coterie.coordinator.side_planning import ServerForecast
from coterie.ids import WorkerId
from coterie.metrics.fault_records import EnergyRecord
from coterie.metrics.records import (
    AnyRecord,
    DeviceSummary,
    EvaluationRecord,
    LinkSummary,
    MemoryRecord,
    SideFigures,
    StepRecord,
    SummaryRecord,
    WorkerStep,
)
from coterie.planner.plan import Plan
from coterie.units import name_units


class _Device:
    """What one device has done."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.cpu_s = 0.0
        self.told_s = 0.0
        self.peak_bytes = 0
        self.taps_bytes = 0
        self.wire_bytes = 0
        self.sent_next_bytes = 0
        self.rss_bytes = 0


class SideBooks:
    """Keeps what the summary needs and hands every record to `write`."""

    def __init__(
        self, job: Job, server: Member, feeder: TrainingFeeder, write: Callable[[AnyRecord], None], clock: Clock
    ) -> None:
        self._job = job
        self._server = server
        self._feeder = feeder
        self._write = write
        self._clock = clock
        self._plan: Plan | None = None
        self._devices: dict[WorkerId, _Device] = {}
        self._forecast: ServerForecast | None = None
        self._energy: dict[WorkerId, EnergyRecord] = {}
        self._server_peak_bytes = 0
        self._server_busy_s = 0.0
        self._since_s = clock.now()
        self._step_seconds: list[float] = []
        self._first_step = 0
        self._tokens = 0
        self._rows = 1
        self._rows_forwarded = 0
        self._cache_bytes = 0
        self._collect_s = 0.0
        self._begin_s = clock.now()
        self.fetched_bytes = 0
        self.losses: list[float] = []
        self.evaluations: dict[str, EvaluationRecord] = {}

    def planned(self, plan: Plan) -> None:
        """Note who the devices are."""
        self._plan = plan
        self._devices = {stage.worker: _Device() for stage in plan.stages}

    def training_begins(self) -> None:
        """Restart the stopwatch of steps."""
        self._since_s = self._clock.now()

    def collected(self) -> None:
        """Everything is in the cache."""
        self._collect_s = self._clock.now() - self._begin_s

    def heartbeat(self, member: Member) -> None:
        """Note a worker's memory, and what it has drawn."""
        device = self._devices.get(member.worker)
        if device is not None:
            device.rss_bytes = member.rss_bytes
        peak = device.peak_bytes if device is not None else self._server_peak_bytes
        limit = self._limit(member.worker)
        self._write(
            MemoryRecord(worker=member.worker, memory_bytes=member.rss_bytes, limit_bytes=limit, peak_bytes=peak)
        )
        drawn = energy_of(member)
        if drawn is not None:
            self._energy[member.worker] = drawn

    def forwarded(self, worker: WorkerId, message: StageForwarded) -> None:
        """Note a micro-batch that a device has run."""
        device = self._devices[worker]
        device.forward_s += message.forward_s
        device.cpu_s += message.cpu_s
        device.peak_bytes = max(device.peak_bytes, message.peak_bytes)
        device.taps_bytes += message.taps_bytes
        device.wire_bytes += message.wire_bytes
        device.sent_next_bytes = message.sent_next_bytes

    def stored(self, message: BatchStored, rows: int) -> None:
        """Note a micro-batch that the server has."""
        self._cache_bytes = message.cache_bytes
        self._rows_forwarded += rows

    def server_stands(self, forecast: ServerForecast, cache_bytes: int, rows: int) -> None:
        """Note what the server is to take, what its cache held before, and how many rows it is to hold."""
        self._forecast = forecast
        self._cache_bytes = cache_bytes
        self._rows = rows

    def step(self, step: int, entry: StepEntry) -> None:
        """Note a finished optimizer step."""
        now_s = self._clock.now()
        seconds, self._since_s = now_s - self._since_s, now_s
        done = entry.done[self._server.worker]
        self._server_peak_bytes = max(self._server_peak_bytes, done.peak_bytes)
        self._server_busy_s += done.forward_s
        if not self._step_seconds:
            self._first_step = step
        self._step_seconds.append(seconds)
        self.losses.append(entry.loss)
        self._tokens += self._feeder.tokens(step)
        self._write(
            StepRecord(
                step=step,
                epoch=self._feeder.rows(step).epoch,
                loss=entry.loss,
                tokens=self._feeder.tokens(step),
                loss_tokens=sum(entry.loss_tokens.values()),
                seconds=seconds,
                learning_rate=done.learning_rate,
                grad_norm=done.grad_norm,
                workers=(*self._device_steps(seconds), self._server_step(done, seconds)),
            )
        )

    def _device_steps(self, seconds: float) -> tuple[WorkerStep, ...]:
        steps = []
        for worker, device in self._devices.items():
            busy_s, device.told_s = device.forward_s - device.told_s, device.forward_s
            steps.append(
                WorkerStep(
                    worker=worker,
                    utilization=min(busy_s / max(seconds, 1e-9), 1.0),
                    memory_bytes=device.rss_bytes,
                    peak_bytes=device.peak_bytes,
                )
            )
        return tuple(steps)

    def _server_step(self, done: StepDone, seconds: float) -> WorkerStep:
        return WorkerStep(
            worker=self._server.worker,
            utilization=min(done.forward_s / max(seconds, 1e-9), 1.0),
            memory_bytes=self._server.rss_bytes,
            peak_bytes=self._server_peak_bytes,
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        """Note an evaluation; the last one of each split goes into the summary."""
        self.evaluations[record.split] = record
        self._write(record)

    def summary(self, output: str) -> SummaryRecord:
        """The run in figures, so far."""
        steps = len(self._step_seconds)
        seconds = sum(self._step_seconds)
        plan = self._plan
        return SummaryRecord(
            model=self._job.source.name,
            method="side",
            schedule="forward",
            steps=steps,
            epochs=-(-steps // self._job.steps_per_epoch),
            seconds=seconds,
            tokens=self._tokens,
            first_loss=self.losses[0] if self.losses else None,
            last_loss=self.losses[-1] if self.losses else None,
            predicted_step_s=0.0,
            measured_step_s=usual_step_s(self._step_seconds),
            one_device_step_s=plan.one_device_step_s if plan else 0.0,
            one_device_peak_bytes=plan.one_device_peak if plan else 0,
            devices=(*self._device_summaries(), self._server_summary(seconds)),
            links=self._links(),
            quality=tuple(self.evaluations.values()),
            output=output,
            first_step=self._first_step,
            side=self._figures(),
            energy=tuple(self._energy.values()),
        )

    def _figures(self) -> SideFigures:
        devices = self._devices.values()
        return SideFigures(
            server=self._server.hello.name,
            collect_s=self._collect_s,
            device_passes=self._rows_forwarded / self._rows,
            device_forward_s=sum(device.forward_s for device in devices),
            device_cpu_s=sum(device.cpu_s for device in devices),
            taps_bytes=sum(device.taps_bytes for device in devices),
            wire_bytes=sum(device.wire_bytes for device in devices),
            fetched_bytes=self.fetched_bytes,
            cache_bytes=self._cache_bytes,
        )

    def _links(self) -> tuple[LinkSummary, ...]:
        """What devices sent to the next one and to the server; nothing goes back."""
        stages = self._plan.stages if self._plan else ()
        links = [
            LinkSummary(
                source=stage.worker,
                target=after.worker,
                forward_bytes=self._devices[stage.worker].sent_next_bytes,
                backward_bytes=0,
                codec=stage.send_codec,
            )
            for stage, after in pairwise(stages)
        ]
        links += [
            LinkSummary(
                source=stage.worker,
                target=self._server.worker,
                forward_bytes=self._devices[stage.worker].taps_bytes,
                backward_bytes=0,
                codec=self._job.recipe.side.upload,
            )
            for stage in stages
        ]
        return tuple(links)

    def _device_summaries(self) -> tuple[DeviceSummary, ...]:
        if self._plan is None:
            return ()
        return tuple(
            DeviceSummary(
                worker=stage.worker,
                device_name=stage.device_name,
                units=name_units(stage.first_unit, stage.stop_unit, self._plan.units),
                predicted_peak_bytes=stage.memory.total,
                measured_peak_bytes=self._devices[stage.worker].peak_bytes,
                limit_bytes=stage.memory_limit,
                base_bytes=stage.memory.base,
                utilization=min(self._devices[stage.worker].forward_s / max(self._collect_s, 1e-9), 1.0),
            )
            for stage in self._plan.stages
        )

    def _server_summary(self, seconds: float) -> DeviceSummary:
        forecast = self._forecast
        return DeviceSummary(
            worker=self._server.worker,
            device_name=self._server.hello.name,
            units="side network, output layer",
            predicted_peak_bytes=forecast.peak_bytes if forecast else 0,
            measured_peak_bytes=self._server_peak_bytes,
            limit_bytes=forecast.limit_bytes if forecast else 0,
            base_bytes=forecast.parts["worker"] if forecast else 0,
            utilization=min(self._server_busy_s / max(seconds, 1e-9), 1.0),
        )

    def _limit(self, worker: WorkerId) -> int:
        if worker == self._server.worker:
            return self._forecast.limit_bytes if self._forecast else 0
        stages = self._plan.stages if self._plan else ()
        return next((stage.memory_limit for stage in stages if stage.worker == worker), 0)
