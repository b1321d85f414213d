"""How fast one device is: every kind of unit timed as a stage of its own, a matrix product, an optimizer update."""

import gc
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from coterie.ids import WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.measure.allocator import trim_heap
from coterie.measure.process_memory import current_rss_bytes, is_out_of_memory
from coterie.measure.stand_in_weights import StandInWeights
from coterie.measure.timing import Stopwatch, fit_line
from coterie.measure.unit_cost import example_inputs, run_backward, run_forward
from coterie.models import StageModule, build_stage, describe
from coterie.profiles.cluster_profile import DeviceProfile, DeviceType, SharedMemory, UnitTiming
from coterie.profiles.head_allocation import HeadAllocation
from coterie.profiles.model_profile import LayerProfile, ModelProfile
from coterie.units import counted, format_seconds

Progress = Callable[[str, int, int], None]
"""Told before each measurement: what is measured, its number from 1, and how many there are."""


class Sharing(Protocol):
    """How a device's compute backends would share layers."""

    @property
    def allocation(self) -> HeadAllocation:
        """Who would compute what."""
        ...

    @property
    def memory(self) -> SharedMemory:
        """What each shared block takes more."""
        ...

    def install(self, stage: StageModule) -> bool:
        """Share the blocks of a stage; whether there is anything in it that can be shared."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds so far that the calling thread waited for backends."""
        ...


_BUDGET_S = 0.4
"""Aimed-at seconds per measurement; slow devices take longer, since three samples are always taken."""

_MATRIX = 512
_UPDATE_ELEMENTS = 4 << 20
"""16 MiB a tensor, four tensors: more than caches hold, as a real update's are."""

_FLOAT32_BYTES = 4


def profile_device(  # noqa: PLR0913 - plain facts about one device, each named at the call
    spec: ModelSpec,
    model_profile: ModelProfile,
    *,
    worker: WorkerId,
    name: str,
    device_type: DeviceType,
    threads: int,
    memory: int,
    throttle_speed: float | None = None,
    rows: tuple[int, int] = (1, 4),
    progress: Progress | None = None,
    sharing: Sharing | None = None,
    must_share: bool = False,
) -> DeviceProfile:
    """Time this process's device on the model's units, with random weights; reads no file.

    A kind of unit that does not fit into memory here is left without a timing, and the planner estimates it by FLOPs.

    Args:
        spec: The model and what is trained of it.
        model_profile: Its figures; times are taken at its `typical_tokens`.
        worker: The worker that this process is.
        name: What the device's owner calls it.
        device_type: Where to compute.
        threads: Compute threads to use; set for this process.
        memory: What the process may use in all, in bytes (see `memory_budget`).
        throttle_speed: Speed of the emulated device, in (0, 1]; None for the real one.
        rows: Two row counts of micro-batches to time at, the smaller first.
        progress: Told what is measured.
        sharing: Blocks are timed with their layers shared too, and will be shared if that is faster.
        must_share: Or even if it is not.
    """
    torch.set_num_threads(threads)
    elsewhere_cpu_s = sharing.cpu_s if sharing is not None else lambda: 0.0
    watch = Stopwatch(device_type=device_type, throttle_speed=throttle_speed, elsewhere_cpu_s=elsewhere_cpu_s)
    kinds = _first_of_each_kind(model_profile)
    steps = [*(layer.name for _, layer in kinds), "matrix product", "optimizer update"]
    tell = progress or _tell_nobody
    timings: list[_Timed] = []
    bench = _UnitBench(spec, model_profile, device_type, watch, sharing)
    for number, (unit, layer) in enumerate(kinds, start=1):
        tell(layer.name, number, len(steps))
        timing = bench.time_unit(unit, layer, rows)
        if timing is not None:
            timings.append(timing)
        _release_memory()
    tell(steps[-2], len(steps) - 1, len(steps))
    flops_per_s = _matrix_flops_per_s(watch, device_type, torch.float32)
    bfloat16_speed = 1.0
    if spec.compute_dtype == "bfloat16":
        bfloat16_speed = _matrix_flops_per_s(watch, device_type, torch.bfloat16) / flops_per_s
    tell(steps[-1], len(steps), len(steps))
    update_bytes_per_s = _update_bytes_per_s(watch, device_type)
    _release_memory()
    shared = tuple(one.shared for one in timings if one.shared is not None)
    profile = DeviceProfile(
        worker=worker,
        name=name,
        device_type=device_type,
        memory_bytes=memory,
        base_bytes=idle_bytes(device_type),
        threads=threads,
        # Where sharing is prescribed there is nothing to choose from.
        timings=tuple(one.shared if must_share and one.shared is not None else one.alone for one in timings),
        shared_timings=shared,
        must_share=must_share,
        # Copies lie in the processor's memory, which no accelerator's budget is about.
        shared_memory=sharing.memory if sharing is not None and device_type == "cpu" else SharedMemory(),
        flops_per_s=flops_per_s,
        update_bytes_per_s=update_bytes_per_s,
        bfloat16_speed=bfloat16_speed,
    )
    if sharing is None:
        return profile
    return msgspec.structs.replace(
        profile,
        allocation=sharing.allocation if any(map(profile.shares_at, rows)) else None,
        backend_notes=_verdict(profile, timings, rows),
    )


def idle_bytes(device_type: DeviceType) -> int:
    """What this process uses of the budgeted memory before it holds a stage; on a GPU that is nothing."""
    if device_type != "cpu":
        return 0
    _run_common_kernels()
    _release_memory()
    return current_rss_bytes()


class _Timed(msgspec.Struct, frozen=True):
    """A kind of unit on torch alone, and with its layers shared where they can be."""

    alone: UnitTiming
    shared: UnitTiming | None


def _verdict(profile: DeviceProfile, timings: list[_Timed], rows: tuple[int, int]) -> tuple[str, ...]:
    """Whether shared blocks are faster than torch alone, in words: with few rows and with many."""
    both = [(one.alone, one.shared) for one in timings if one.shared is not None]
    if not both:
        return ("no block of this model can be shared among backends",)
    lines = []
    for count in dict.fromkeys(rows):
        alone_s, shared_s = (
            sum(timing.seconds(count) for timing in side) / len(both) for side in zip(*both, strict=True)
        )
        gain = f"{alone_s / shared_s:.2f} times as fast" if profile.shares_at(count) else "nothing is shared"
        figures = f"a shared block takes {format_seconds(shared_s)}, torch alone {format_seconds(alone_s)}"
        lines.append(f"with {counted(count, 'row')} {figures}: {gain}")
    return tuple(lines)


class _UnitBench:
    """Builds and times single units."""

    def __init__(
        self,
        spec: ModelSpec,
        profile: ModelProfile,
        device_type: DeviceType,
        watch: Stopwatch,
        sharing: Sharing | None,
    ) -> None:
        self._spec = spec
        self._first_backward_unit = describe(spec).first_backward_unit
        self._device_type = device_type
        self._tokens = profile.typical_tokens
        self._width = hidden_width(profile)
        self._watch = watch
        self._sharing = sharing

    def time_unit(self, unit: int, layer: LayerProfile, rows: tuple[int, int]) -> _Timed | None:
        """Forward and backward seconds as lines over rows; None if memory runs out."""
        try:
            stages = [self._stage(unit)]
            if self._sharing is not None and self._sharing.allocation != HeadAllocation():
                shared = self._stage(unit)
                stages += [shared] if self._sharing.install(shared) else []
            # As in a run: no backward below everything that is trained, and no gradient that goes there.
            with torch.set_grad_enabled(unit >= self._first_backward_unit):
                lines = self._lines(stages, layer, rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return _Timed(lines[0], lines[1] if len(lines) > 1 else None)

    def _stage(self, unit: int) -> StageModule:
        device = torch.device(self._device_type)
        stage = build_stage(self._spec, unit, unit + 1, StandInWeights(self._spec), device=device)
        stage.train()
        return stage

    def _lines(self, stages: Sequence[StageModule], layer: LayerProfile, rows: tuple[int, int]) -> list[UnitTiming]:
        """A line for each stage; they take turns, so that what else the machine does slows them alike."""
        few, many = (self._medians(stages, count) for count in rows)
        return [_line(layer.kind, rows, ends) for ends in zip(few, many, strict=True)]

    def _medians(self, stages: Sequence[StageModule], rows: int) -> list[tuple[float, float]]:
        """Median seconds of a forward and of its backward, for each stage."""
        inputs = {key: tensor.to(self._device_type) for key, tensor in example_inputs(rows, self._tokens).items()}
        hidden = self._hidden(rows)
        for parameter in (parameter for stage in stages for parameter in stage.trainable().values()):
            parameter.grad = None

        def once() -> tuple[float, ...]:
            return tuple(seconds for stage in stages for seconds in self._once(stage, inputs, hidden))

        found = self._watch.medians(once, budget_s=_BUDGET_S * len(stages))
        return list(zip(found[::2], found[1::2], strict=True))

    def _once(self, stage: StageModule, inputs: dict[str, Tensor], hidden: Tensor) -> tuple[float, float]:
        received = None
        if not stage.is_first:
            received = hidden.detach().requires_grad_(stage.first_unit > self._first_backward_unit)
        outputs: list[Tensor] = []
        forward_s = self._watch.seconds(lambda: outputs.append(run_forward(stage, inputs, received)))
        if stage.first_unit < self._first_backward_unit:
            return forward_s, 0.0
        (output,) = outputs
        gradient = torch.ones_like(output)
        return forward_s, self._watch.seconds(lambda: run_backward(output, gradient))

    def _hidden(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(rows, self._tokens, self._width, generator=generator).to(self._device_type)


def _line(kind: str, rows: tuple[int, int], ends: tuple[tuple[float, float], tuple[float, float]]) -> UnitTiming:
    """Forward and backward seconds as lines over rows."""
    few, many = ends
    forward_fixed_s, forward_per_row_s = fit_line(((rows[0], few[0]), (rows[1], many[0])))
    backward_fixed_s, backward_per_row_s = fit_line(((rows[0], few[1]), (rows[1], many[1])))
    return UnitTiming(
        kind=kind,
        forward_fixed_s=forward_fixed_s,
        forward_per_row_s=forward_per_row_s,
        backward_fixed_s=backward_fixed_s,
        backward_per_row_s=backward_per_row_s,
    )


def hidden_width(profile: ModelProfile) -> int:
    """D: the width of the hidden states between units."""
    return profile.layers[0].boundary.per_row // (profile.memory_tokens * _FLOAT32_BYTES)


def _first_of_each_kind(profile: ModelProfile) -> list[tuple[int, LayerProfile]]:
    """The first unit of every kind, with its index."""
    first: dict[str, tuple[int, LayerProfile]] = {}
    for unit, layer in enumerate(profile.layers):
        first.setdefault(layer.kind, (unit, layer))
    return list(first.values())


def _matrix_flops_per_s(watch: Stopwatch, device_type: DeviceType, dtype: torch.dtype) -> float:
    """Speed of a product of square matrices."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=device_type, dtype=dtype)
    seconds = watch.median(lambda: matrix @ matrix, budget_s=_BUDGET_S)
    return 2.0 * _MATRIX**3 / seconds


def _update_bytes_per_s(watch: Stopwatch, device_type: DeviceType) -> float:
    """Bytes of trained parameters that a fused AdamW update passes per second."""
    elements = _UPDATE_ELEMENTS
    weights, gradients, averages, squares = (torch.full((elements,), 1e-3, device=device_type) for _ in range(4))
    step = torch.zeros((), device=device_type)

    def update() -> None:
        adamw(
            [weights],
            [gradients],
            [averages],
            [squares],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-4,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
        )

    return elements * _FLOAT32_BYTES / watch.median(update, budget_s=_BUDGET_S)


def _run_common_kernels() -> None:
    """Load what torch loads with a first forward and backward (libraries, thread pools): part of idle memory."""
    weight = torch.ones(8, 8, requires_grad=True)
    output = torch.nn.functional.layer_norm(torch.nn.functional.gelu(torch.ones(8, 8) @ weight), (8,))
    torch.autograd.backward(output.sum())


def _release_memory() -> None:
    gc.collect()
    trim_heap()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _tell_nobody(_what: str, _number: int, _of: int) -> None:
    pass
