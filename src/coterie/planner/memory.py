"""How much memory a stage takes: what the meta device counted, plus a few constants that were measured.

`peak = base + weights + trained x (gradient + optimizer copies + further versions) + (in flight - 1) x saved + the most
that one micro-batch's backward takes + holes of the allocator + buffers`. A backward frees what it saved, from the last
unit to the first, while working memory (and, where none exist yet, gradients) comes up: its peak lies at one unit, and
is found by looking at each. Only the tight allocator (and a GPU's) gives back what is freed; with glibc's default all
of it adds up. Stages below everything that is trained keep nothing for a backward and get no gradient: they take
weights, working memory, and buffers of one direction. The arithmetic runs on plain integers for one stage and on arrays
for all stages at once (the search), and must stay the same for both: integers only.
"""

from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.planner.plan import Allocator, MemoryEstimate
from coterie.profiles.cluster_profile import DeviceType, SharedMemory
from coterie.profiles.model_profile import LayerProfile, ModelProfile
from coterie.schedules.actions import ScheduleKind
from coterie.units import MIB

# What was measured rather than counted; `benchmarks/memory.py` compares predictions with peaks and is the place to
# calibrate from.

RUNTIME_BYTES = 16 * MIB
"""Thread stacks, oneDNN scratch, the event loop, Python objects of a running stage; 8-11 MiB without a network."""

FORWARD_RUNTIME_BYTES = 10 * MIB
"""The same in training for a stage without a backward: 5 (the embedding alone) to 11 MiB without a network."""

TIGHT_ALLOCATOR_PERCENT = 102
"""With a fixed mmap threshold of 128 KiB freed blocks go back at once: 41.5 MiB cost 41.6 MiB, plus page rounding."""

HOLES_PERCENT = 100
"""glibc's default allocator never shrinks its heap, and leaves holes between blocks that live longer: so much of what
the micro-batches in flight save (measured 96-104 under LoRA). Where everything is trained, gradients fill the holes of
one micro-batch (measured 90-108 for each beyond the first, none for that)."""

HOLES_OF_STASH_PERCENT = 25
"""The same where everything is trained and gradients go after every micro-batch (measured 17-30)."""

HOLES_OF_RECOMPUTATION_PERCENT = 100
"""Recomputed blocks leave holes too: of what one micro-batch would save, however many wait (measured 88-124)."""

GPU_ALLOCATOR_PERCENT = 110
"""PyTorch's caching allocators round blocks up and keep a few; not measured here."""

LINK_COPIES = 2
"""Buffers per direction of a link: one being filled or sent, one waiting in the bounded queue."""

Bytes = TypeVar("Bytes", int, NDArray[np.int64])


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage's memory depends on besides its units, rows and depth.

    `accumulates` is False where a step has one micro-batch (under `stash` each is an update of its own anyway).
    `kept_rows` are the rows of which every stage keeps something while others run: of a generation keys and values.
    `shared` is what a block takes more where compute backends share it.
    """

    schedule: ScheduleKind = "flush"
    optimizer_state_copies: int = 2
    recompute: bool = False
    allocator: Allocator = "default"
    device_type: DeviceType = "cpu"
    accumulates: bool = True
    kept_rows: int = 0
    shared: SharedMemory = SharedMemory()

    @property
    def activation_percent(self) -> int:
        """Resident bytes per 100 bytes of live activations, holes apart."""
        return TIGHT_ALLOCATOR_PERCENT if self.device_type == "cpu" else GPU_ALLOCATOR_PERCENT

    @property
    def leaves_holes(self) -> bool:
        """Does the allocator keep what is freed?"""
        return self.device_type == "cpu" and self.allocator == "default"

    @property
    def adds_gradients(self) -> bool:
        """Does a backward add to existing gradients? Else gradients and what is saved are never whole at once."""
        return self.accumulates and self.schedule != "stash"


class StageSizes(NamedTuple, Generic[Bytes]):
    """Sums over a stage's units, for one micro-batch.

    Attributes:
        weights, trained: Parameters, a tied matrix once per stage.
        blocks: How many of its units are blocks.
        saved: Kept for backward without recomputation.
        kept: Kept with recomputation: block inputs, and what embedding and output layer save.
        adding, fresh: Most that one micro-batch takes during its backward, without recomputation, where gradients exist
            and where they come up meanwhile (then beyond their sum: it may be negative).
        adding_again, fresh_again: The same with recomputation.
        largest_block_saved: What one block saves while it is recomputed.
        transient, fresh_transient: Largest working memory of a unit, in the same two cases.
        received, sent: One hidden state of the link before and after; 0 at the ends.
        returned: The gradients of both, where they come back.
        exchanged: Buffer for the tied matrix's gradient from the other end.
        runtime: What running takes in training, whatever the model.
        kept_row: What one row of a generation keeps.
    """

    weights: Bytes
    trained: Bytes
    blocks: Bytes
    saved: Bytes
    kept: Bytes
    adding: Bytes
    fresh: Bytes
    adding_again: Bytes
    fresh_again: Bytes
    largest_block_saved: Bytes
    transient: Bytes
    fresh_transient: Bytes
    received: Bytes
    sent: Bytes
    returned: Bytes
    exchanged: Bytes
    runtime: Bytes
    kept_row: Bytes


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
    copies = sizes.blocks * settings.shared.copies
    runtime = nothing + RUNTIME_BYTES
    if settings.schedule == "forward":
        return StageBytes(
            weights=sizes.weights + copies,
            gradients=nothing,
            optimizer=nothing,
            versions=nothing,
            versions_per_depth=nothing,
            activations=sizes.kept_row * settings.kept_rows * percent // 100,
            activations_per_depth=nothing,
            transient=sizes.transient * percent // 100,
            buffers=runtime + LINK_COPIES * (sizes.received + sizes.sent),
        )
    # Depth d keeps d versions under `stash`, the newest among the weights: d - 1 more. Backends copy each of them.
    versioned = sizes.trained + copies * _trained_percent(sizes) // 100
    versions = {"stash": -versioned, "2bw": versioned}.get(settings.schedule, nothing)
    kept, working = _one_micro_batch(sizes, settings)
    holes, holes_per_depth = _holes(sizes, settings)
    kept, beyond = kept * percent // 100, (working - kept) * percent // 100
    more = (beyond + abs(beyond)) // 2
    return StageBytes(
        weights=sizes.weights + copies,
        gradients=sizes.trained,
        optimizer=sizes.trained * settings.optimizer_state_copies,
        versions=versions,
        versions_per_depth=versioned if settings.schedule == "stash" else nothing,
        activations=beyond - more + holes,
        activations_per_depth=kept + holes_per_depth,
        transient=more + sizes.blocks // (sizes.blocks + (sizes.blocks == 0)) * settings.shared.working,
        buffers=sizes.runtime + LINK_COPIES * (sizes.received + sizes.sent + sizes.returned) + sizes.exchanged,
    )


def _one_micro_batch(sizes: StageSizes[Bytes], settings: MemorySettings) -> tuple[Bytes, Bytes]:
    """What a waiting micro-batch keeps, and the most that one takes in its backward."""
    kept = sizes.kept if settings.recompute else sizes.saved
    if settings.leaves_holes:
        block = sizes.largest_block_saved if settings.recompute else kept * 0
        return kept, kept + block + (sizes.transient if settings.adds_gradients else sizes.fresh_transient)
    if settings.recompute:
        return kept, sizes.adding_again if settings.adds_gradients else sizes.fresh_again
    return kept, sizes.adding if settings.adds_gradients else sizes.fresh


def _holes(sizes: StageSizes[Bytes], settings: MemorySettings) -> tuple[Bytes, Bytes]:
    """Freed memory that the process keeps: at depth 0, and for each micro-batch in flight."""
    if not settings.leaves_holes:
        return sizes.saved * 0, sizes.saved * 0
    if settings.recompute:
        return sizes.saved * HOLES_OF_RECOMPUTATION_PERCENT // 100, sizes.saved * 0
    trained_percent = _trained_percent(sizes)
    filled = HOLES_PERCENT - HOLES_OF_STASH_PERCENT if settings.schedule == "stash" else 0
    each = sizes.saved * (100 * HOLES_PERCENT - filled * trained_percent) // 10_000
    return -each * trained_percent // 100, each


def _trained_percent(sizes: StageSizes[Bytes]) -> Bytes:
    percent: Bytes = 100 * sizes.trained // (sizes.weights + (sizes.weights == 0))
    return percent


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
    kept = [_kept(model, number, rows) for number in numbers]
    peaks = [max(terms[first_unit:stop_unit]) - before[first_unit] for terms, before in _backward_peaks(model, rows)]
    lowest = model.first_backward_unit
    masks = model.shared.at(rows) if stop_unit > lowest else 0
    received = _boundary(model.layers, first_unit - 1, rows)
    sent = _boundary(model.layers, stop_unit - 1, rows) if stop_unit <= last else 0
    has_both_ends = len(model.layers) > 1 and first_unit == 0 and stop_unit == last + 1
    shared = model.tied_bytes if model.tied and has_both_ends else 0
    trained_tie = tied_is_trained(model)
    has_one_end = (first_unit == 0) != (stop_unit == last + 1)
    return StageSizes(
        weights=sum(layer.parameter_bytes for layer in layers) - shared,
        trained=sum(layer.trainable_bytes for layer in layers) - (shared if trained_tie else 0),
        blocks=sum(is_block),
        saved=sum(saved) + masks,
        kept=sum(kept) + masks,
        adding=peaks[0] + masks,
        fresh=peaks[1] + masks,
        adding_again=peaks[2] + masks,
        fresh_again=peaks[3] + masks,
        largest_block_saved=max((size for size, block in zip(saved, is_block, strict=True) if block), default=0),
        transient=max(layer.transient.at(rows) for layer in layers),
        fresh_transient=max(layer.fresh_transient.at(rows) for layer in layers),
        received=received,
        sent=sent,
        returned=(received if first_unit > lowest else 0) + (sent if stop_unit > lowest else 0),
        exchanged=model.tied_bytes if trained_tie and has_one_end else 0,
        runtime=RUNTIME_BYTES if stop_unit > lowest else FORWARD_RUNTIME_BYTES,
        kept_row=sum(layer.kept_bytes_per_row for layer in layers),
    )


def _kept(model: ModelProfile, unit: int, rows: int) -> int:
    """What a unit keeps under recomputation: a block its input, if there will be a backward; an end what it saves."""
    if 0 < unit < len(model.layers) - 1:
        return model.layers[unit - 1].boundary.at(rows) if unit >= model.first_backward_unit else 0
    return model.layers[unit].saved.at(rows)


def _boundary(layers: tuple[LayerProfile, ...], unit: int, rows: int) -> int:
    return layers[unit].boundary.at(rows) if unit >= 0 else 0


def _backward_peaks(model: ModelProfile, rows: int) -> list[tuple[list[int], list[int]]]:
    """`adding`, `fresh`, `adding_again`, `fresh_again` of every stage, as terms per unit and offsets.

    When the backward reaches unit u of a stage [i, j), what the units i ... u saved is still there, the gradients of
    u ... j - 1 have come up, and u works. The largest of the terms i ... j - 1, less the offset at i, is the peak.
    """
    last = len(model.layers) - 1
    peaks = []
    for again in (False, True):
        for fresh in (False, True):
            terms: list[int] = []
            before: list[int] = []
            saved = gradients = 0
            for number, layer in enumerate(model.layers):
                own, working = layer.saved.at(rows), 0
                if again and 0 < number < last:
                    own, working = _kept(model, number, rows), own
                before.append(saved - (gradients if fresh else 0))
                saved += own
                transient = layer.fresh_transient if fresh else layer.transient
                terms.append(saved + working + transient.at(rows) - (gradients if fresh else 0))
                gradients += layer.trainable_bytes
            peaks.append((terms, before))
    return peaks


def all_stage_sizes(model: ModelProfile, rows: int) -> StageSizes[NDArray[np.int64]]:
    """`stage_sizes` of every stage at once: arrays [first_unit, stop_unit], of which only first < stop is used."""
    units = len(model.layers)
    shape = (units + 1, units + 1)
    first, stop = np.indices(shape)
    block = np.array([0 < unit < units - 1 for unit in range(units)])
    saved = np.array([layer.saved.at(rows) for layer in model.layers], dtype=np.int64)
    boundary = np.array([layer.boundary.at(rows) for layer in model.layers], dtype=np.int64)
    kept = np.array([_kept(model, unit, rows) for unit in range(units)], dtype=np.int64)
    peaks = [
        _range_maxima(np.array(terms, dtype=np.int64)) - np.array([*before, 0], dtype=np.int64)[:, None]
        for terms, before in _backward_peaks(model, rows)
    ]
    lowest = model.first_backward_unit
    masks = np.where(stop > lowest, model.shared.at(rows), 0)
    shared = np.where((first == 0) & (stop == units) & (units > 1), model.tied_bytes if model.tied else 0, 0)
    trained_tie = tied_is_trained(model)
    one_end = (first == 0) != (stop == units)
    around = np.concatenate([[0], boundary[:-1], [0]])  # index: the cut; no link at the ends
    return StageSizes(
        weights=_range_sums([layer.parameter_bytes for layer in model.layers]) - shared,
        trained=_range_sums([layer.trainable_bytes for layer in model.layers]) - (shared if trained_tie else 0),
        blocks=_range_sums(block.astype(np.int64)),
        saved=_range_sums(saved) + masks,
        kept=_range_sums(kept) + masks,
        adding=peaks[0] + masks,
        fresh=peaks[1] + masks,
        adding_again=peaks[2] + masks,
        fresh_again=peaks[3] + masks,
        largest_block_saved=_range_maxima(np.where(block, saved, 0)),
        transient=_range_maxima(np.array([layer.transient.at(rows) for layer in model.layers], dtype=np.int64)),
        fresh_transient=_range_maxima(np.array([u.fresh_transient.at(rows) for u in model.layers], dtype=np.int64)),
        received=np.broadcast_to(around[:, None], shape),
        sent=np.broadcast_to(around[None, :], shape),
        returned=np.where(first > lowest, around[:, None], 0) + np.where(stop > lowest, around[None, :], 0),
        exchanged=np.where(one_end, model.tied_bytes if trained_tie else 0, 0),
        runtime=np.where(stop > lowest, RUNTIME_BYTES, FORWARD_RUNTIME_BYTES),
        kept_row=_range_sums([layer.kept_bytes_per_row for layer in model.layers]),
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
