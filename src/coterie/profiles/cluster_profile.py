"""What devices can do and how fast they reach each other."""

from typing import Literal

import msgspec

from coterie.ids import WorkerId
from coterie.profiles.head_allocation import HeadAllocation

DeviceType = Literal["cpu", "cuda", "mps", "xpu"]

RESERVE_PERCENT = 5
"""Part of a device's budget that no plan uses: a prediction may be that far off, and so may other programs' needs."""


def plannable_bytes(budget_bytes: int) -> int:
    """What a plan may use of a budget."""
    return budget_bytes - budget_bytes * RESERVE_PERCENT // 100


class UnitTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one kind of unit on one device at `typical_tokens`, affine in the rows of a micro-batch."""

    kind: str
    forward_fixed_s: float = 0.0
    forward_per_row_s: float = 0.0
    backward_fixed_s: float = 0.0
    backward_per_row_s: float = 0.0

    def forward_s(self, rows: int) -> float:
        """Seconds of a forward over `rows` rows."""
        return self.forward_fixed_s + self.forward_per_row_s * rows

    def backward_s(self, rows: int) -> float:
        """Seconds of a backward over `rows` rows."""
        return self.backward_fixed_s + self.backward_per_row_s * rows

    def seconds(self, rows: int) -> float:
        """Of both."""
        return self.forward_s(rows) + self.backward_s(rows)


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What sharing a block among compute backends takes of the worker process beyond the block itself, in bytes.

    Attributes:
        copies: Weights that backends hold once more, for as long as the stage stands.
        working: Gradients of weights, in parts and joined, while a backward runs.
    """

    copies: int = 0
    working: int = 0


LEAST_BLOCK_GAIN = 0.1
"""A shared block must make torch's own at least this much longer, or nothing is shared."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One device, as its worker measured it.

    Attributes:
        worker: The worker on it.
        name: What its owner calls it.
        device_type: Where its stage would run.
        memory_bytes: What the worker process may use in all: the least of the user's budget, container limits and free
            memory; on a GPU the device memory's budget.
        base_bytes: What the worker process uses before it holds a stage.
        threads: Compute threads.
        timings: Measured seconds per kind of unit, on torch alone.
        shared_timings: The same of the kinds whose layers its compute backends can share, shared.
        must_share: Layers are shared whatever that takes: who gets what was prescribed.
        flops_per_s: Measured speed of a plain matrix product; stands in for kinds without a timing.
        update_bytes_per_s: Trained bytes that an optimizer update passes per second.
        bfloat16_speed: Speed of a bfloat16 matrix product against a float32 one, measured where a run computes in it.
        measured_at_s: When, in seconds since 1970 by the device's own clock; 0 if that is not known.
        allocation: How its compute backends share each layer where that is faster; None: nowhere.
        shared_memory: What each block then takes more.
        backend_notes: What is to be said of its backends: what sharing gains, or why nothing is shared.
    """

    worker: WorkerId
    name: str
    device_type: DeviceType = "cpu"
    memory_bytes: int
    base_bytes: int
    threads: int = 1
    timings: tuple[UnitTiming, ...] = ()
    shared_timings: tuple[UnitTiming, ...] = ()
    must_share: bool = False
    flops_per_s: float
    update_bytes_per_s: float = 1e9
    bfloat16_speed: float = 1.0
    measured_at_s: float = 0.0
    allocation: HeadAllocation | None = None
    shared_memory: SharedMemory = SharedMemory()
    backend_notes: tuple[str, ...] = ()

    def shares_at(self, rows: int) -> bool:
        """Whether its backends share layers in micro-batches of `rows` rows: with few rows that may cost more time.

        Torch alone has to take notably longer: what is won must be more than what measurements are wrong by.
        """
        alone = {timing.kind: timing for timing in self.timings}
        both = [(alone[shared.kind], shared) for shared in self.shared_timings if shared.kind in alone]
        alone_s, shared_s = (sum(pair[side].seconds(rows) for pair in both) for side in (0, 1))
        return bool(both) and (self.must_share or shared_s * (1 + LEAST_BLOCK_GAIN) <= alone_s)

    def timing_of(self, kind: str, rows: int) -> UnitTiming | None:
        """What such a unit takes in micro-batches of `rows` rows; None if it was not measured."""
        timings = (*self.shared_timings, *self.timings) if self.shares_at(rows) else self.timings
        return next((timing for timing in timings if timing.kind == kind), None)

    def shared_memory_at(self, rows: int) -> SharedMemory:
        """What a block takes more in micro-batches of `rows` rows."""
        return self.shared_memory if self.shares_at(rows) else SharedMemory()


def at_speed(device: DeviceProfile, speed: float) -> DeviceProfile:
    """The device as it would be measured if it computed `speed` times as fast."""
    return msgspec.structs.replace(
        device,
        timings=tuple(_timing_at(timing, speed) for timing in device.timings),
        shared_timings=tuple(_timing_at(timing, speed) for timing in device.shared_timings),
        flops_per_s=device.flops_per_s * speed,
        update_bytes_per_s=device.update_bytes_per_s * speed,
    )


def _timing_at(timing: UnitTiming, speed: float) -> UnitTiming:
    return UnitTiming(
        kind=timing.kind,
        forward_fixed_s=timing.forward_fixed_s / speed,
        forward_per_row_s=timing.forward_per_row_s / speed,
        backward_fixed_s=timing.backward_fixed_s / speed,
        backward_per_row_s=timing.backward_per_row_s / speed,
    )


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two workers, measured by a probe."""

    source: WorkerId
    target: WorkerId
    bytes_per_s: float
    latency_s: float


class ClusterProfile(msgspec.Struct, frozen=True, kw_only=True):
    """All devices and all measured links of a run."""

    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...] = ()
