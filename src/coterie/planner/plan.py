"""The plan: which device runs which units, how, and what that is predicted to cost."""

from typing import Literal

import msgspec

from coterie.ids import WorkerId
from coterie.schedules.actions import ScheduleKind

Objective = Literal["time", "memory"]
Codec = Literal["fp32", "fp16", "int8"]
Allocator = Literal["default", "tight"]


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted peak of a stage's process, in bytes, by what takes it. `total` is their sum."""

    base: int
    weights: int
    gradients: int
    optimizer: int
    weight_versions: int
    activations: int
    transient: int
    buffers: int

    @property
    def total(self) -> int:
        """The predicted peak of the process."""
        return self.base + self.above_base

    @property
    def above_base(self) -> int:
        """The predicted peak above the idle worker."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.weight_versions
            + self.activations
            + self.transient
            + self.buffers
        )


class StageAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: units [first_unit, stop_unit) on one worker.

    Attributes:
        in_flight: Most micro-batches forwarded and not yet backwarded here (1F1B: S - s).
        recompute: Keep block inputs only and run blocks' forwards again in backward.
        send_codec: How this stage's output and the gradient that comes back for it cross the link to the next stage.
        forward_s, backward_s: Predicted seconds per micro-batch.
        send_s: Predicted seconds on the link to the next stage per micro-batch, one direction.
    """

    stage: int
    worker: WorkerId
    device_name: str
    first_unit: int
    stop_unit: int
    in_flight: int
    recompute: bool
    allocator: Allocator
    send_codec: Codec
    memory: MemoryEstimate
    memory_limit: int
    forward_s: float
    backward_s: float
    update_s: float
    send_s: float


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the plan does not use, and why."""

    worker: WorkerId
    device_name: str
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, never changed: a new situation makes a new plan with a higher `version`.

    `micro_batches` and `batch_rows` are fixed for a run, through every re-plan: they are part of what the numbers mean.
    `keeps_data_local`: token ids and labels are for the devices of their owner only, which run the two ends.
    `one_device_peak` and `one_device_step_s` are what the fastest single device would need with the same batch, whole.
    """

    version: int
    schedule: ScheduleKind
    objective: Objective
    batch_rows: int
    micro_batches: int
    units: int
    stages: tuple[StageAssignment, ...]
    left_out: tuple[LeftOut, ...]
    predicted_step_s: float
    one_device_step_s: float
    one_device_peak: int
    notes: tuple[str, ...] = ()
    keeps_data_local: bool = False
