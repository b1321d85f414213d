"""A run at a glance: where it is, and how each device does. From its records, whether it goes on or has ended."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from coterie.metrics.fault_records import MembershipRecord, RebalanceRecord, RecoveryRecord
from coterie.metrics.progress import DeviceLine, RunState
from coterie.metrics.records import (
    AnyRecord,
    FaultRecord,
    LinkSummary,
    PlanRecord,
    StageRecord,
    StartRecord,
    StepRecord,
    SummaryRecord,
)

RunPhase = Literal[
    "preparing", "training", "pausing", "paused", "stopping", "saving", "finished", "stopped", "failed", "killed"
]
"""Where a run is. The last four are those of a run that has ended."""

ENDED: tuple[RunPhase, ...] = ("finished", "stopped", "failed", "killed")

CHANGES_KEPT = 4

_STOPPED_SLUG = "interrupted"


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device that takes part. What is not known is None, and not 0.

    Attributes:
        stage: Its place in the pipeline, from 0; None of a spare device, or of a server.
        first_unit, stop_unit: The units of its stage: 0 is the embedding, 1 the first block.
        utilization: Part of the wall time that it computes, 0 to 1.
        memory_bytes: Most that its process has used.
        limit_bytes: Its budget; 0 if none is known.
        link: How it reaches the next stage: `direct`, `unix socket` or `relayed`; empty of the last one.
        battery: Charge, 0 to 1.
        watts_source: Where `watts` and `joules` come from; see `Vitals`.
    """

    worker: str
    name: str
    stage: int | None = None
    first_unit: int = 0
    stop_unit: int = 0
    utilization: float | None = None
    memory_bytes: int | None = None
    limit_bytes: int = 0
    link: str = ""
    battery: float | None = None
    on_power: bool | None = None
    watts: float | None = None
    joules: float | None = None
    watts_source: str = ""
    celsius: float | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.

    Attributes:
        phase: Where it is.
        step: Optimizer steps done, those before a resume included.
        seconds_per_step: Running mean of the last steps; None before the first one.
        eta_s: Seconds that the remaining steps will take at this rate.
        units: Units of the model, which stages are cut from; 0 before there is a plan.
        plan_version: Of the plan in effect; 0 before there is one.
        devices: In the order of their stages; spare ones after them.
        news: The last thing that was said of it, for people.
        fault: The last thing that went wrong; empty if nothing did.
        changes: The last devices that came or went, recoveries and moves of layers, a line each, for people.
        output: The run's folder, on the coordinator's machine.
    """

    run: str = ""
    model: str = ""
    phase: RunPhase = "preparing"
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    loss: float | None = None
    tokens_per_s: float = 0.0
    seconds_per_step: float | None = None
    eta_s: float | None = None
    units: int = 0
    plan_version: int = 0
    schedule: str = ""
    devices: tuple[DeviceStatus, ...] = ()
    news: str = ""
    fault: str = ""
    changes: tuple[str, ...] = ()
    output: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether no process works on it any more."""
        return self.phase in ENDED


class StatusBook:
    """Folds a run's records into its status. What only a live run knows is laid over it by whoever has it."""

    def __init__(self, output: str = "") -> None:
        self._output = output
        self._figures = RunState(0, ())
        self._start: StartRecord | None = None
        self._plan: PlanRecord | None = None
        self._summary: SummaryRecord | None = None
        self._fault: FaultRecord | None = None
        self._ending: FaultRecord | None = None
        self._changes: list[str] = []

    def take(self, record: AnyRecord) -> None:
        """Note a record."""
        match record:
            case StartRecord():
                self._start = record
                self._summary = self._ending = None
                # Its plan comes first: devices stay, figures of steps begin anew.
                self._figures = RunState(record.total_steps, tuple(self._figures.devices.values()))
            case PlanRecord():
                self._take_plan(record)
            case SummaryRecord():
                self._summary = record
            case FaultRecord():
                self._fault = record
                # A fault without a worker is what a run ends with.
                self._ending = None if record.worker else record
            case StepRecord():
                self._ending = None
            case MembershipRecord() | RecoveryRecord():
                self._changed(record.line)
            case RebalanceRecord(worth=True):
                self._changed(record.line)
            case _:
                pass
        self._figures.take(record)

    def _changed(self, line: str) -> None:
        # What a recovery says begins with what was said of the loss.
        others = [known for known in self._changes if not line.startswith(known)]
        self._changes = [*others[1 - CHANGES_KEPT :], line]

    def _take_plan(self, plan: PlanRecord) -> None:
        """From here on these devices count; one that the plan before used and this one does not is gone, or spare."""
        self._plan = plan
        known = self._figures.devices
        self._figures.devices = {
            stage.worker: known.get(stage.worker) or DeviceLine(stage.worker, stage.device_name, stage.memory_limit, "")
            for stage in plan.stages
        }

    def take_all(self, records: Iterable[AnyRecord]) -> None:
        """Note records in their order."""
        for record in records:
            self.take(record)

    @property
    def phase(self) -> RunPhase:
        """Where the run is, by its records alone; a process that was killed has written no ending."""
        if self._ending is not None:
            return "stopped" if self._ending.slug == _STOPPED_SLUG else "failed"
        if self._summary is not None:
            return "saving"
        return "training" if self._start is not None else "preparing"

    def status(self) -> RunStatus:
        """The run as the records so far describe it."""
        figures, plan, start = self._figures, self._plan, self._start
        step_s = figures.step_s
        return RunStatus(
            run=start.run if start else "",
            model=start.model if start else "",
            phase=self.phase,
            step=figures.steps_done,
            total_steps=figures.total_steps,
            epoch=figures.epoch,
            loss=figures.loss,
            tokens_per_s=figures.tokens_per_s,
            seconds_per_step=step_s or None,
            eta_s=figures.eta_s if step_s else None,
            units=plan.units if plan else 0,
            plan_version=plan.version if plan else 0,
            schedule=plan.schedule if plan else "",
            devices=self._devices(),
            fault=self._fault.message if self._fault else "",
            changes=tuple(self._changes),
            output=self._output,
        )

    def _devices(self) -> tuple[DeviceStatus, ...]:
        stages = self._plan.stages if self._plan else ()
        links = self._summary.links if self._summary else ()
        known = self._figures.devices
        found = [self._stage(stage, links) for stage in stages]
        others = [worker for worker in known if worker not in {stage.worker for stage in stages}]
        return (*found, *(self._with_figures(DeviceStatus(worker=worker, name=worker)) for worker in others))

    def _stage(self, stage: StageRecord, links: tuple[LinkSummary, ...]) -> DeviceStatus:
        return self._with_figures(
            DeviceStatus(
                worker=stage.worker,
                name=stage.device_name,
                stage=stage.stage,
                first_unit=stage.first_unit,
                stop_unit=stage.stop_unit,
                limit_bytes=stage.memory_limit,
                link=next((link.path for link in links if link.source == stage.worker), ""),
            )
        )

    def _with_figures(self, device: DeviceStatus) -> DeviceStatus:
        line = self._figures.devices.get(device.worker)
        if line is None:
            return device
        return msgspec.structs.replace(
            device,
            utilization=line.utilization if self._figures.step_s else None,
            memory_bytes=line.memory_bytes or None,
            limit_bytes=line.limit_bytes or device.limit_bytes,
        )
