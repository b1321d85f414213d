"""A request with its micro-batch count decided, as numbers: seconds of units, links and codecs.

The formula that the search minimises (METHODS 1; all times per micro-batch of stage s on its device):

- `C_s` = forward + backward (+ the blocks' forward again when recomputing) + update / micro-batches per update. An
  update counts as a part of each micro-batch that it applies.
- `R_s` = both transfers over the link to stage s + 1, both latencies.
- `A_s` = sum of `C_t + R_t` for t >= s: how long a micro-batch is away from stage s. `A_0` fills the pipeline.
- `P` = the slowest of: every `C_s`; every transfer of a link in one direction; `A_s / d_s`, since no more than `d_s`
  micro-batches may be away at once (only where `d_s` is below the micro-batches that there are).
- `flush`, `gpipe`, `forward`: a step takes `A_0 + (m - 1) P`, plus the exchange of a trained tied matrix.
- `stash`, `2bw`: a step takes `m P` in steady state, plus that exchange under `2bw`.

`gpipe` has no `d_s` and counts a link's two directions together; `forward` has no backward and no way back. Below
everything that is trained there is no backward either, and nothing but the word that a micro-batch is done comes back:
it keeps a stage from running ahead further than `d_s`.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.planner.memory import MemorySettings, estimate_memory, tied_is_trained
from coterie.planner.plan import Allocator, Codec, MemoryEstimate
from coterie.planner.request import PlanRequest
from coterie.profiles.cluster_profile import DeviceProfile
from coterie.profiles.model_profile import LayerProfile
from coterie.schedules.actions import ScheduleKind
from coterie.units import MIB

Floats = NDArray[np.float64]

TIGHT_ALLOCATOR_SLOWDOWN = 1.06
"""The tight allocator gives memory back and faults it in again: 1-13 % more CPU at BERT size, 31 % for tiny models."""

UNMEASURED_BYTES_PER_S = 100e6 / 8
UNMEASURED_LATENCY_S = 5e-3
"""A pair without a probe in either direction counts as an ordinary wireless link, and the plan says so."""

CODEC_SIZE = {"fp32": 1.0, "fp16": 0.5, "int8": 0.255}
"""Bytes on the wire per byte of fp32; int8 carries a scale per row."""

CODEC_S_PER_BYTE = {"fp32": 0.0, "fp16": 2 * 0.1e-3 / MIB, "int8": 2 * 1e-3 / MIB}
"""Seconds to encode and decode a byte of fp32: 0.1 ms and 1 ms per MiB and end."""


class StageChoice(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions about one stage; `device` is an index into the cluster's devices."""

    device: int
    first_unit: int
    stop_unit: int
    depth: int
    recompute: bool = False
    allocator: Allocator = "default"
    codec: Codec = "fp32"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the formula says about a candidate."""

    step_s: float
    period_s: float
    away_s: tuple[float, ...]
    peaks_above_base: tuple[int, ...]
    fits: bool


def is_continuous(kind: ScheduleKind) -> bool:
    """Does the pipeline stay full from step to step?"""
    return kind in {"stash", "2bw"}


class Problem:
    """One request at one micro-batch count."""

    def __init__(self, request: PlanRequest, micro_batches: int) -> None:
        self.request = request
        self.kind: ScheduleKind = request.schedule
        self.model = request.model
        self.micro_batches = micro_batches
        self.rows = -(-request.batch_rows // micro_batches)
        self.devices = request.cluster.devices
        self.units = len(self.model.layers)
        self.first_backward_unit = self.model.first_backward_unit
        per_update = 1 if self.kind == "stash" else micro_batches
        seconds = [[unit_seconds(device, layer, self.rows) for layer in self.model.layers] for device in self.devices]
        self.forward_s: Floats = np.array([[forward for forward, _ in row] for row in seconds])
        self.backward_s: Floats = np.array([[backward for _, backward in row] for row in seconds])
        trained = np.array([layer.trainable_bytes for layer in self.model.layers], dtype=np.float64)
        rates = np.array([device.update_bytes_per_s for device in self.devices])
        self.update_s: Floats = trained[None, :] / rates[:, None] / per_update
        if self.kind == "forward":
            self.backward_s = np.zeros_like(self.backward_s)
            self.update_s = np.zeros_like(self.update_s)
        self.updates_per_step = micro_batches // per_update
        self.bytes_per_s, self.latency_s, self.unmeasured = _links(request)
        scale = self.model.typical_tokens / max(self.model.memory_tokens, 1)
        self._transfers_s: dict[Codec, tuple[Floats, Floats]] = {}
        self.sent_bytes: Floats = np.array([layer.boundary.at(self.rows) * scale for layer in self.model.layers])

    def allocators(self, device: int) -> tuple[Allocator, ...]:
        """Allocators to choose among on a device; `tight` is a matter of the C library's."""
        if self.devices[device].device_type != "cpu" or self.request.allocator == "default":
            return ("default",)
        # Weights that come and go between activations leave holes in glibc's heap that nobody can predict.
        if self.request.allocator == "tight" or self.model.unpacks:
            return ("tight",)
        return ("default", "tight")

    def recompute_choices(self) -> tuple[bool, ...]:
        """Whether stages may keep all activations, run forwards again, or either."""
        if self.kind == "forward":
            return (False,)
        if self.request.require_recompute:
            return (True,)
        return (False, True) if self.request.allow_recompute else (False,)

    def settings(self, device: int, *, recompute: bool, allocator: Allocator) -> MemorySettings:
        """What a stage's memory on `device` depends on."""
        return MemorySettings(
            schedule=self.kind,
            optimizer_state_copies=self.request.optimizer_state_copies,
            recompute=recompute,
            allocator=allocator,
            device_type=self.devices[device].device_type,
            accumulates=self.micro_batches > 1,
            kept_rows=self.rows if self.request.keeps_micro_batch else self.request.kept_rows,
            shared=self.devices[device].shared_memory_at(self.rows),
        )

    def in_flight(self, depth: int) -> int:
        """Micro-batches really in flight at a depth: no more than there are."""
        if self.kind == "gpipe":
            return self.micro_batches
        return depth if self.kind == "stash" else min(depth, self.micro_batches)

    def memory(self, choice: StageChoice) -> MemoryEstimate:
        """Predicted peak of a stage's process."""
        settings = self.settings(choice.device, recompute=choice.recompute, allocator=choice.allocator)
        return estimate_memory(
            self.model,
            (choice.first_unit, choice.stop_unit),
            rows=self.rows,
            in_flight=self.in_flight(choice.depth),
            settings=settings,
            base_bytes=self.devices[choice.device].base_bytes,
        )

    def compute_s(self, choice: StageChoice) -> tuple[float, float, float]:
        """Forward, backward and the update's share, in seconds per micro-batch."""
        own = slice(choice.first_unit, choice.stop_unit)
        first_again = max(choice.first_unit, 1, self.first_backward_unit)
        blocks = slice(first_again, max(min(choice.stop_unit, self.units - 1), first_again))
        forward = float(self.forward_s[choice.device, own].sum())
        backward = float(self.backward_s[choice.device, own].sum())
        if choice.recompute:
            backward += float(self.forward_s[choice.device, blocks].sum())
        slower = TIGHT_ALLOCATOR_SLOWDOWN if choice.allocator == "tight" else 1.0
        return forward * slower, backward * slower, float(self.update_s[choice.device, own].sum())

    def transfers_s(self, codec: Codec) -> tuple[Floats, Floats]:
        """[W, W, N+1]: seconds that a micro-batch cut at each unit occupies each link, there and back."""
        if codec not in self._transfers_s:
            sizes = np.concatenate([[0.0], self.sent_bytes])
            coding = sizes * CODEC_S_PER_BYTE[codec]
            there = sizes * CODEC_SIZE[codec] / self.bytes_per_s[:, :, None] + coding
            back = np.zeros_like(there) if self.kind == "forward" else there.transpose(1, 0, 2).copy()
            back[:, :, : self.first_backward_unit + 1] = 0.0
            self._transfers_s[codec] = there, back
        return self._transfers_s[codec]

    def transfer_s(self, source: int, target: int, stop_unit: int, codec: Codec) -> tuple[float, float]:
        """Seconds that a micro-batch's hidden states occupy the link, and its gradient the way back."""
        there, back = self.transfers_s(codec)
        return float(there[source, target, stop_unit]), float(back[source, target, stop_unit])

    def round_trip_latencies_s(self) -> Floats:
        """[W, W]: latency there and, where something comes back, back."""
        return self.latency_s if self.kind == "forward" else self.latency_s + self.latency_s.T

    def round_trip_latency_s(self, source: int, target: int) -> float:
        """Both latencies between two devices."""
        return float(self.round_trip_latencies_s()[source, target])

    def exchange_s(self, first: int, last: int) -> float:
        """Seconds per step in which the two ends swap the gradient of a trained tied matrix."""
        if first == last or self.kind == "forward" or not tied_is_trained(self.model):
            return 0.0
        slower = min(float(self.bytes_per_s[first, last]), float(self.bytes_per_s[last, first]))
        return self.model.tied_bytes / slower + max(
            float(self.latency_s[first, last]), float(self.latency_s[last, first])
        )

    def step_s(self, away_s: float, period_s: float, exchange_s: float) -> float:
        """The formula: a step from its fill time and its period."""
        if is_continuous(self.kind):
            return self.micro_batches * period_s + exchange_s
        return away_s + (self.micro_batches - 1) * period_s + exchange_s

    def cost(self, stages: Sequence[StageChoice]) -> Cost:
        """Apply the formula to a whole candidate."""
        period = away = 0.0
        away_s: list[float] = []
        peaks: list[int] = []
        fits = True
        following: StageChoice | None = None
        for stage in reversed(stages):
            compute = sum(self.compute_s(stage))
            period = max(period, compute)
            if following is not None:
                there, back = self.transfer_s(stage.device, following.device, stage.stop_unit, stage.codec)
                period = max(period, there + back) if self.kind == "gpipe" else max(period, there, back)
                away += there + back + self.round_trip_latency_s(stage.device, following.device)
            away += compute
            if self.is_limited(stage.depth):
                period = max(period, away / stage.depth)
            away_s.append(away)
            memory = self.memory(stage)
            peaks.append(memory.above_base)
            fits = fits and memory.total <= self.devices[stage.device].memory_bytes
            following = stage
        exchange = self.exchange_s(stages[0].device, stages[-1].device)
        return Cost(
            step_s=self.step_s(away, period, exchange),
            period_s=period,
            away_s=tuple(reversed(away_s)),
            peaks_above_base=tuple(reversed(peaks)),
            fits=fits,
        )

    def is_limited(self, depth: int) -> bool:
        """Can a stage of this depth have to wait for a backward before its next forward?"""
        if self.kind in {"gpipe", "forward"}:
            return False
        return is_continuous(self.kind) or depth < self.micro_batches


def unit_seconds(device: DeviceProfile, layer: LayerProfile, rows: int) -> tuple[float, float]:
    """Seconds of a unit's forward and backward: measured for its kind, else from its operations."""
    timing = device.timing_of(layer.kind, rows)
    if timing is not None:
        return timing.forward_s(rows), timing.backward_s(rows)
    return (
        layer.forward_flops_per_row * rows / device.flops_per_s,
        layer.backward_flops_per_row * rows / device.flops_per_s,
    )


def _links(request: PlanRequest) -> tuple[Floats, Floats, list[tuple[int, int]]]:
    """Bandwidth and latency from each device to each other, and the pairs that nobody measured."""
    index = {device.worker: number for number, device in enumerate(request.cluster.devices)}
    count = len(index)
    rate = np.full((count, count), np.nan)
    latency = np.full((count, count), np.nan)
    for link in request.cluster.links:
        if link.source in index and link.target in index:
            rate[index[link.source], index[link.target]] = link.bytes_per_s
            latency[index[link.source], index[link.target]] = link.latency_s
    # A pair probed in one direction only is taken to be alike in the other.
    rate = np.where(np.isnan(rate), rate.T, rate)
    latency = np.where(np.isnan(latency), latency.T, latency)
    unmeasured = [(a, b) for a in range(count) for b in range(a + 1, count) if np.isnan(rate[a, b])]
    rate = np.where(np.isnan(rate), UNMEASURED_BYTES_PER_S, rate)
    latency = np.where(np.isnan(latency), UNMEASURED_LATENCY_S, latency)
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(latency, 0.0)
    return rate, latency, unmeasured
