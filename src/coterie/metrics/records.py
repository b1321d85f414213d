"""What a run writes down, as typed records: one closed union, one JSON object per record, told apart by `type`.

Everything that people or programs see of a run (progress display, plot, TensorBoard, summary, `events.jsonl`) is made
from these. Numbers that are not finite become `null` in JSON, so the fields that may be so allow None.
"""

from typing import Self

import msgspec

from coterie.metrics.fault_records import EnergyRecord, MembershipRecord, RebalanceRecord, RecoveryRecord
from coterie.metrics.record import Record


class StartRecord(Record, frozen=True, kw_only=True):
    """A run begins, or continues: steps recorded earlier from `first_step` on are void."""

    run: str
    package_version: str
    model: str
    total_steps: int
    steps_per_epoch: int
    first_step: int = 0


class WorkerStep(msgspec.Struct, frozen=True, kw_only=True):
    """One worker during one optimizer step.

    Attributes:
        utilization: Part of the step's wall time that it computed, 0 to 1.
        memory_bytes: Its process's memory at the end of the step.
        peak_bytes: The highest so far.
        backends: Where layers are shared among compute backends: part of the step's wall time that each was busy.
    """

    worker: str
    utilization: float
    memory_bytes: int
    peak_bytes: int = 0
    backends: dict[str, float] = {}


class StepRecord(Record, frozen=True, kw_only=True):
    """One optimizer step.

    Attributes:
        step: From 0 (screens and messages count from 1).
        epoch: From 0.
        loss: Mean over the step's loss tokens.
        tokens: Tokens computed, padding left out.
        loss_tokens: Tokens with a label.
        seconds: Wall time since the step before.
        grad_norm: Global norm before clipping; None in modes that have none (`stash`).
    """

    step: int
    epoch: int
    loss: float | None
    tokens: int
    loss_tokens: int
    seconds: float
    learning_rate: float
    grad_norm: float | None = None
    workers: tuple[WorkerStep, ...] = ()


class MemoryRecord(Record, frozen=True, kw_only=True):
    """A worker's memory between steps, from its heartbeat."""

    worker: str
    memory_bytes: int
    limit_bytes: int
    peak_bytes: int = 0


class TrafficRecord(Record, frozen=True, kw_only=True):
    """Bytes that went over one link in one direction since the run began."""

    source: str
    target: str
    sent_bytes: int
    codec: str = "fp32"


class EvaluationRecord(Record, frozen=True, kw_only=True):
    """Quality on held-out data.

    Attributes:
        split: `dev` or `test`.
        step: Optimizer steps done.
        epoch: Epochs done.
        loss: Mean loss over its loss tokens.
        metrics: By name, such as `f1`: shares of 1, and the main one; `main_metric` names it.
        main_is_share: The main figure is a share of 1, to be shown as a percentage; else a plain number.
        details: Further figures: counts, and figures per label.
        report: A table for people.
    """

    split: str
    step: int
    epoch: int
    loss: float | None
    metrics: dict[str, float]
    main_metric: str
    seconds: float
    main_is_share: bool = True
    report: str = ""
    details: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def main_value(self) -> float:
        """The main metric's value."""
        return self.metrics[self.main_metric]

    @property
    def main_text(self) -> str:
        """The main metric for people: `entity_f1 54.8%`, `perplexity 12.31`."""
        return f"{self.main_metric} {self.text_of(self.main_metric)}"

    def text_of(self, metric: str) -> str:
        """One of `metrics` for people: `54.8%`, or `12.31` for a main figure that is no share."""
        value = self.metrics[metric]
        is_number = metric == self.main_metric and not self.main_is_share
        return f"{value:.4g}" if is_number else f"{value:.1%}"


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's predicted peak in bytes, by what takes it."""

    base: int
    weights: int
    gradients: int
    optimizer: int
    weight_versions: int
    activations: int
    transient: int
    buffers: int
    total: int


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a plan; the fields are those of `coterie.planner.plan.StageAssignment`."""

    stage: int
    worker: str
    device_name: str
    first_unit: int
    stop_unit: int
    in_flight: int
    recompute: bool
    allocator: str
    send_codec: str
    memory: StageMemory
    memory_limit: int
    forward_s: float
    backward_s: float
    update_s: float
    send_s: float


class LeftOutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the plan does not use."""

    device_name: str
    reason: str


class PlanRecord(Record, frozen=True, kw_only=True):
    """A plan that takes effect; the fields are those of `coterie.planner.plan.Plan`."""

    version: int
    schedule: str
    objective: str
    batch_rows: int
    micro_batches: int
    units: int
    stages: tuple[StageRecord, ...]
    left_out: tuple[LeftOutRecord, ...]
    predicted_step_s: float
    one_device_step_s: float
    one_device_peak: int
    notes: tuple[str, ...] = ()
    keeps_data_local: bool = False

    @classmethod
    def of(cls, plan: msgspec.Struct) -> Self:
        """The record of a `Plan` (taken by its attributes: this floor does not know the planner)."""
        return msgspec.convert(plan, cls, from_attributes=True)


class FaultRecord(Record, frozen=True, kw_only=True):
    """Something went wrong: an error by its slug, with worker and step (from 0) where they are known."""

    slug: str
    message: str
    worker: str = ""
    step: int | None = None


class DeviceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One device over the whole run. Peaks are of the whole worker process.

    Attributes:
        units: What it held, for people, such as `embedding, blocks 0-2`.
        limit_bytes: Its budget; 0 if none was set.
        base_bytes: The idle worker before it held a stage.
        utilization: Computing part of the training's wall time, 0 to 1.
        backends: Where layers were shared among compute backends: part of the training's wall time that each was busy.
        backends_left_out: Backends that failed during the run and were used no more, with the reason.
    """

    worker: str
    device_name: str
    units: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    limit_bytes: int = 0
    base_bytes: int = 0
    utilization: float = 0.0
    backends: dict[str, float] = {}
    backends_left_out: dict[str, str] = {}


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One link over the whole run, both directions. `path` is `direct`, `unix socket` or `relayed`."""

    source: str
    target: str
    forward_bytes: int
    backward_bytes: int
    codec: str = "fp32"
    path: str = ""


class SideFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is particular to a side-tuning run.

    Attributes:
        collect_s: Wall time until everything was in the server's cache.
        device_passes: How often devices ran the backbone over all rows (training, `dev` and `test` together).
        device_forward_s, device_cpu_s: Of all devices together, in forwards.
        taps_bytes: Activations that devices sent, as the formulas count them.
        wire_bytes: The same with the frames' headers, before encryption.
        fetched_bytes: The side network and task layers, fetched at the end.
        cache_bytes: What the server's cache takes.
    """

    server: str
    collect_s: float
    device_passes: float
    device_forward_s: float
    device_cpu_s: float
    taps_bytes: int
    wire_bytes: int
    fetched_bytes: int
    cache_bytes: int


class SummaryRecord(Record, frozen=True, kw_only=True):
    """The run in figures.

    Attributes:
        steps: Optimizer steps done; of a resumed run those since.
        first_step: Steps done before the run was resumed; 0 if it was not.
        seconds: Wall time of training, evaluation left out.
        one_device_peak_bytes: What the fastest device alone would need for the same batch, whole (predicted).
        one_device_step_s: Seconds per step it would need (predicted).
        quality: The last evaluations, one per split.
        counts: Further counts worth a line, such as `rows truncated`.
        side: Of a side-tuning run; `steps` then are the server's.
        recoveries: Devices that were lost, and how the run went on.
        rebalances: Other plans that were taken. Of these, and of `recoveries`, the last 200; the event log has all.
        energy: What each device has drawn, where that is known.
    """

    model: str
    method: str
    schedule: str
    steps: int
    epochs: int
    seconds: float
    tokens: int
    first_loss: float | None
    last_loss: float | None
    predicted_step_s: float
    measured_step_s: float
    one_device_step_s: float
    one_device_peak_bytes: int
    devices: tuple[DeviceSummary, ...]
    links: tuple[LinkSummary, ...] = ()
    quality: tuple[EvaluationRecord, ...] = ()
    output: str = ""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    first_step: int = 0
    side: SideFigures | None = None
    recoveries: tuple[RecoveryRecord, ...] = ()
    rebalances: tuple[RebalanceRecord, ...] = ()
    energy: tuple[EnergyRecord, ...] = ()


AnyRecord = (
    StartRecord
    | StepRecord
    | MemoryRecord
    | TrafficRecord
    | EvaluationRecord
    | PlanRecord
    | FaultRecord
    | MembershipRecord
    | RecoveryRecord
    | RebalanceRecord
    | EnergyRecord
    | SummaryRecord
)
"""Every record that may stand in `events.jsonl`."""
