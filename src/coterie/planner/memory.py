"""How much memory a stage takes: what the meta device counted, plus a few constants that were measured.

`peak = base + weights + trained x (gradient + optimizer copies + further versions) + in flight x saved + transient +
buffers`; within -5 to +7 % of the measured peak with the tight allocator. The arithmetic runs on plain integers for one
stage and on arrays for all stages at once (the search), and must stay the same for both: integers only.
"""

from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.planner.plan import Allocator, MemoryEstimate
from coterie.profiles.cluster_profile import DeviceType
from coterie.profiles.model_profile import LayerProfile, ModelProfile
from coterie.schedules.actions import ScheduleKind
from coterie.units import MIB

# What was measured rather than counted; `benchmarks/memory.py` compares predictions with peaks and is the place to
# calibrate from.

RUNTIME_BYTES = 40 * MIB
"""Thread stacks, oneDNN scratch, the event loop, Python objects of a running stage: 40-60 MiB above the idle worker."""

DEFAULT_ALLOCATOR_PERCENT = 160
"""glibc's default allocator fragments: activations of 41.5 MiB cost 73-79 MiB under LoRA, less when fully trained."""

TIGHT_ALLOCATOR_PERCENT = 102
"""With a fixed mmap threshold of 128 KiB freed blocks go back at once: 41.5 MiB cost 41.6 MiB, plus page rounding."""

GPU_ALLOCATOR_PERCENT = 110
"""PyTorch's caching allocators round blocks up and keep a few; not measured here."""

LINK_COPIES = 2
"""Buffers per direction of a link: one being filled or sent, one waiting in the bounded queue."""

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage's memory depends on besides its units, rows and depth."""

    schedule: ScheduleKind = "flush"
    optimizer_state_copies: int = 2
    recompute: bool = False
    allocator: Allocator = "default"
    device_type: DeviceType = "cpu"

    @property
    def activation_percent(self) -> int:
        """Resident bytes per 100 bytes of live activations."""
        if self.device_type != "cpu":
            return GPU_ALLOCATOR_PERCENT
        return TIGHT_ALLOCATOR_PERCENT if self.allocator == "tight" else DEFAULT_ALLOCATOR_PERCENT


class StageSizes(NamedTuple, Generic[Bytes]):
    """Sums over a stage's units, for one micro-batch.

    Attributes:
        weights, trained: Parameters, a tied matrix once per stage.
        saved: Kept for backward without recomputation.
        saved_beside_blocks: The part of it that embedding and output layer keep.
        block_inputs: Inputs of the stage's blocks, which recomputation keeps.
        largest_block_saved: What one block keeps while it is recomputed.
        transient: Largest working memory of a unit.
        received, sent: One hidden state of the link before and after; 0 at the ends.
        exchanged: Buffer for the tied matrix's gradient from the other end.
    """

    weights: Bytes
    trained: Bytes
    saved: Bytes
    saved_beside_blocks: Bytes
    block_inputs: Bytes
    largest_block_saved: Bytes
    transient: Bytes
    received: Bytes
    sent: Bytes
    exchanged: Bytes


class StageBytes(NamedTuple, Generic[Bytes]):
    """A stage's memory above base: what is fixed, and what each micro-batch in flight adds."""

    weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    versions: Bytes
    versions_per_depth: Bytes
    activations: Bytes
    activations_per_depth: Bytes
    transient: Bytes
    buffers: Bytes

    @property
    def fixed(self) -> Bytes:
        """Bytes at depth 0."""
        states = self.weights + self.gradients + self.optimizer + self.versions
        return states + self.activations + self.transient + self.buffers

    @property
    def per_depth(self) -> Bytes:
        """Bytes that one more micro-batch in flight adds."""
        return self.versions_per_depth + self.activations_per_depth


def stage_bytes(sizes: StageSizes[Bytes], settings: MemorySettings) -> StageBytes[Bytes]:
    """Turn a stage's sizes into its memory under `settings`."""
    nothing = sizes.weights * 0
    percent = settings.activation_percent
    runtime = nothing + RUNTIME_BYTES
    transient = sizes.transient * percent // 100
    if settings.schedule == "forward":
        return StageBytes(
            weights=sizes.weights,
            gradients=nothing,
            optimizer=nothing,
            versions=nothing,
            versions_per_depth=nothing,
            activations=nothing,
            activations_per_depth=nothing,
            transient=transient,
            buffers=runtime + LINK_COPIES * (sizes.received + sizes.sent),
        )
    # Depth d keeps d versions under `stash`, the newest among the weights: d - 1 more.
    versions = {"stash": -sizes.trained, "2bw": sizes.trained}.get(settings.schedule, nothing)
    kept, working = sizes.saved, nothing
    if settings.recompute:
        kept = sizes.saved_beside_blocks + sizes.block_inputs
        working = sizes.largest_block_saved
    return StageBytes(
        weights=sizes.weights,
        gradients=sizes.trained,
        optimizer=sizes.trained * settings.optimizer_state_copies,
        versions=versions,
        versions_per_depth=sizes.trained if settings.schedule == "stash" else nothing,
        activations=working * percent // 100,
        activations_per_depth=kept * percent // 100,
        transient=transient,
        buffers=runtime + 2 * LINK_COPIES * (sizes.received + sizes.sent) + sizes.exchanged,
    )


def tied_is_trained(model: ModelProfile) -> bool:
    """Is the tied matrix among the trained parameters, so that two ends must exchange its gradient?"""
    ends = (model.layers[0], model.layers[-1])
    return model.tied and model.tied_bytes > 0 and all(end.trainable_bytes >= model.tied_bytes for end in ends)


def stage_sizes(model: ModelProfile, first_unit: int, stop_unit: int, rows: int) -> StageSizes[int]:
    """Sum what units [first_unit, stop_unit) hold for a micro-batch of `rows` rows."""
    layers = model.layers[first_unit:stop_unit]
    last = len(model.layers) - 1
    numbers = range(first_unit, stop_unit)
    is_block = [0 < number < last for number in numbers]
    saved = [layer.saved.at(rows) for layer in layers]
    has_both_ends = len(model.layers) > 1 and first_unit == 0 and stop_unit == last + 1
    shared = model.tied_bytes if model.tied and has_both_ends else 0
    trained_tie = tied_is_trained(model)
    has_one_end = (first_unit == 0) != (stop_unit == last + 1)
    return StageSizes(
        weights=sum(layer.parameter_bytes for layer in layers) - shared,
        trained=sum(layer.trainable_bytes for layer in layers) - (shared if trained_tie else 0),
        saved=sum(saved),
        saved_beside_blocks=sum(size for size, block in zip(saved, is_block, strict=True) if not block),
        block_inputs=sum(
            model.layers[number - 1].boundary.at(rows) for number, block in zip(numbers, is_block, strict=True) if block
        ),
        largest_block_saved=max((size for size, block in zip(saved, is_block, strict=True) if block), default=0),
        transient=max(layer.transient.at(rows) for layer in layers),
        received=_boundary(model.layers, first_unit - 1, rows),
        sent=_boundary(model.layers, stop_unit - 1, rows) if stop_unit <= last else 0,
        exchanged=model.tied_bytes if trained_tie and has_one_end else 0,
    )


def _boundary(layers: tuple[LayerProfile, ...], unit: int, rows: int) -> int:
    return layers[unit].boundary.at(rows) if unit >= 0 else 0


def all_stage_sizes(model: ModelProfile, rows: int) -> StageSizes[NDArray[np.int64]]:
    """`stage_sizes` of every stage at once: arrays [first_unit, stop_unit], of which only first < stop is used."""
    units = len(model.layers)
    shape = (units + 1, units + 1)
    first, stop = np.indices(shape)
    block = np.array([0 < unit < units - 1 for unit in range(units)])
    saved = np.array([layer.saved.at(rows) for layer in model.layers], dtype=np.int64)
    boundary = np.array([layer.boundary.at(rows) for layer in model.layers], dtype=np.int64)
    inputs = np.where(block, np.concatenate([[0], boundary[:-1]]), 0)
    shared = np.where((first == 0) & (stop == units) & (units > 1), model.tied_bytes if model.tied else 0, 0)
    trained_tie = tied_is_trained(model)
    one_end = (first == 0) != (stop == units)
    around = np.concatenate([[0], boundary[:-1], [0]])  # index: the cut; no link at the ends
    return StageSizes(
        weights=_range_sums([layer.parameter_bytes for layer in model.layers]) - shared,
        trained=_range_sums([layer.trainable_bytes for layer in model.layers]) - (shared if trained_tie else 0),
        saved=_range_sums(saved),
        saved_beside_blocks=_range_sums(np.where(block, 0, saved)),
        block_inputs=_range_sums(inputs),
        largest_block_saved=_range_maxima(np.where(block, saved, 0)),
        transient=_range_maxima(np.array([layer.transient.at(rows) for layer in model.layers], dtype=np.int64)),
        received=np.broadcast_to(around[:, None], shape),
        sent=np.broadcast_to(around[None, :], shape),
        exchanged=np.where(one_end, model.tied_bytes if trained_tie else 0, 0),
    )


def _range_sums(values: list[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.concatenate([[0], np.cumsum(np.asarray(values, dtype=np.int64))])
    return np.asarray(total[None, :] - total[:, None], dtype=np.int64)


def _range_maxima(values: NDArray[np.int64]) -> NDArray[np.int64]:
    units = len(values)
    maxima = np.zeros((units + 1, units + 1), dtype=np.int64)
    for first in range(units):
        maxima[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return maxima


def estimate_memory(
    model: ModelProfile,
    units: tuple[int, int],
    *,
    rows: int,
    in_flight: int,
    settings: MemorySettings,
    base_bytes: int = 0,
) -> MemoryEstimate:
    """Predict the peak of a process that runs one stage.

    Args:
        model: The model's profile.
        units: First unit and the one after the last.
        rows: Rows of a micro-batch.
        in_flight: Most micro-batches forwarded and not yet backwarded; under `stash` also the live weight versions.
        settings: Schedule, optimizer, recomputation, allocator.
        base_bytes: The process before it holds a stage.
    """
    parts = stage_bytes(stage_sizes(model, units[0], units[1], rows), settings)
    return MemoryEstimate(
        base=base_bytes,
        weights=parts.weights,
        gradients=parts.gradients,
        optimizer=parts.optimizer,
        weight_versions=parts.versions + in_flight * parts.versions_per_depth,
        activations=parts.activations + in_flight * parts.activations_per_depth,
        transient=parts.transient,
        buffers=parts.buffers,
    )
