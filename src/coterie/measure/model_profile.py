"""What every unit of a model costs at a run's shapes: counted without its weights, in about a second."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie.jobs.model_spec import ModelSpec
from coterie.logs import get_logger
from coterie.measure.fake_stage import build_fake_stage, is_tiny
from coterie.measure.keys import model_profile_key
from coterie.measure.stand_in_weights import StandInWeights
from coterie.measure.unit_cost import count_flops, count_stage, example_inputs, run_forward, saved_bytes
from coterie.models import Anatomy, StageModule, build_stage, describe
from coterie.models.frozen_weights import held_bytes
from coterie.profiles.model_profile import AffineBytes, LayerProfile, ModelProfile

_LOG = get_logger(__name__)
_FLOAT32_BYTES = 4
_ROWS = (2, 8)
"""Two row counts fix a line; a single row is left out, since some models treat it in a way of its own."""


def profile_model(spec: ModelSpec, *, memory_tokens: int, typical_tokens: int, name: str) -> ModelProfile:
    """Count what each unit costs; units of equal kind are counted once.

    Each unit runs as a stage of its own, forward and backward, on fake tensors (see `unit_cost`). A tiny model's run on
    real random numbers, which gives the same figures sooner. A model whose forward depends on values (experts chosen by
    a router) has no others: its units run on random numbers too, which is slower and said in the notes.

    Args:
        spec: The model and what is trained of it.
        memory_tokens: T for memory figures: the longest padded micro-batch of the run.
        typical_tokens: T for time figures: the mean padded length.
        name: What to call the model in tables.

    Raises:
        UnsupportedModelError: The model cannot be cut; the message says why.
    """
    notes: tuple[str, ...] = ()
    anatomy = describe(spec)
    try:
        counted = _Counting(spec, memory_tokens, typical_tokens, fake=not is_tiny(anatomy, memory_tokens)).all_units()
    except RuntimeError as error:  # torch's word for "this depends on values" is one of many RuntimeErrors
        _LOG.info("counting %s on real tensors: %s", name, error)
        notes = ("counted on random inputs: this model's memory depends on values (such as chosen experts)",)
        counted = _Counting(spec, memory_tokens, typical_tokens, fake=False).all_units()
    return ModelProfile(
        key=model_profile_key(spec, memory_tokens=memory_tokens, typical_tokens=typical_tokens),
        name=name,
        layers=tuple(_layer(spec, anatomy, unit, counted[unit]) for unit in range(anatomy.unit_count)),
        tied=anatomy.tied is not None,
        tied_bytes=0 if anatomy.tied is None else _bytes_of(anatomy, (anatomy.tied.name,)),
        memory_tokens=memory_tokens,
        typical_tokens=typical_tokens,
        shared=_most([cost.shared for cost in counted]),
        unpacks=spec.frozen_dtype != "float32",
        notes=notes,
    )


class _UnitCost(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one kind of unit, as functions of rows, and FLOPs per row."""

    saved: AffineBytes
    shared: AffineBytes
    output: AffineBytes
    transient: AffineBytes
    fresh_transient: AffineBytes
    forward_flops: float
    backward_flops: float


class _Counting:
    """Runs units, one kind after the other, on fake or on real tensors."""

    def __init__(self, spec: ModelSpec, memory_tokens: int, typical_tokens: int, *, fake: bool) -> None:
        self._spec = spec
        self._anatomy = describe(spec)
        self._memory_tokens = memory_tokens
        self._typical_tokens = typical_tokens
        self._mode = FakeTensorMode() if fake else None

    def all_units(self) -> list[_UnitCost]:
        """The cost of every unit, in order."""
        known: dict[str, _UnitCost] = {}
        with torch.random.fork_rng(devices=[]):  # real tensors draw numbers; a run's own must not depend on that
            self._width, self._hidden_dtype = self._hidden_layout()
            for unit, kind in enumerate(self._anatomy.unit_kinds):
                if kind not in known:
                    known[kind] = self._count(unit)
        return [known[kind] for kind in self._anatomy.unit_kinds]

    def _count(self, unit: int) -> _UnitCost:
        stage = self._build(unit, unit + 1)
        with self._as_it_runs(unit):
            few, many = (count_stage(stage, *self._received(stage, rows)) for rows in _ROWS)
            forward_flops, backward_flops = count_flops(stage, *self._received(stage, 1, self._typical_tokens))
        masks = self._shared_with_its_like(unit, many.saved)
        return _UnitCost(
            saved=_line(few.saved - masks * _ROWS[0] // _ROWS[1], many.saved - masks),
            shared=_line(few.inputs + masks * _ROWS[0] // _ROWS[1], many.inputs + masks),
            output=_line(few.output, many.output),
            transient=_line(few.transient, many.transient),
            fresh_transient=_line(few.fresh_transient, many.fresh_transient),
            forward_flops=float(forward_flops),
            backward_flops=float(backward_flops),
        )

    def _shared_with_its_like(self, unit: int, alone: int) -> int:
        """Of what a block saves for the larger row count, the bytes that one beside it would share: masks."""
        other = self._its_like(unit)
        if other is None:
            return 0
        kinds = self._anatomy.unit_kinds
        apart = alone if kinds[other] == kinds[unit] else self._saved(other, other + 1)
        return max(alone + apart - self._saved(min(unit, other), max(unit, other) + 1), 0)

    def _its_like(self, unit: int) -> int | None:
        """A neighbour that runs as this block does, or differs from it by where gradients end."""
        kinds, lowest = self._anatomy.unit_kinds, self._anatomy.first_backward_unit
        saving = range(max(lowest, 1), len(kinds) - 1)
        beside = [other for other in (unit + 1, unit - 1) if unit in saving and other in saving]
        return next((other for other in beside if kinds[other] == kinds[unit] or lowest in {unit, other}), None)

    def _saved(self, first_unit: int, stop_unit: int) -> int:
        stage = self._build(first_unit, stop_unit)
        with self._as_it_runs(first_unit):
            return saved_bytes(stage, *self._received(stage, _ROWS[1]))

    @contextmanager
    def _as_it_runs(self, unit: int) -> Iterator[None]:
        """On the tensors to count with; without gradients below everything that is trained: all is transient then."""
        with self._mode or nullcontext(), torch.set_grad_enabled(unit >= self._anatomy.first_backward_unit):
            yield

    def _received(
        self, stage: StageModule, rows: int, tokens: int | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """What a stage is given: inputs and hidden states."""
        tokens = tokens or self._memory_tokens
        hidden = None
        if not stage.is_first:
            hidden = torch.randn(rows, tokens, self._width).to(self._hidden_dtype)
            hidden.requires_grad_(stage.first_unit > self._anatomy.first_backward_unit)
        return example_inputs(rows, tokens), hidden

    def _build(self, first_unit: int, stop_unit: int) -> StageModule:
        if self._mode is not None:
            return build_fake_stage(self._spec, first_unit, stop_unit, self._mode)
        return build_stage(self._spec, first_unit, stop_unit, StandInWeights(self._spec))

    def _hidden_layout(self) -> tuple[int, torch.dtype]:
        """Width D and type of the hidden states between units."""
        embedding = self._build(0, 1)
        with self._mode or nullcontext():
            output = run_forward(embedding, example_inputs(_ROWS[0], self._typical_tokens), None)
        return output.shape[-1], output.dtype


def _layer(spec: ModelSpec, anatomy: Anatomy, unit: int, cost: _UnitCost) -> LayerProfile:
    own = anatomy.names_in(unit, unit + 1)
    tied = anatomy.tied.name if anatomy.tied is not None else None
    trained = set(anatomy.trainable[unit]) | ({tied} & set(own) & set(anatomy.trainable[0]))
    trained_bytes = [_bytes_of(anatomy, (name,)) for name in own if name in trained]
    return LayerProfile(
        name=anatomy.unit_names[unit],
        kind=anatomy.unit_kinds[unit],
        parameter_bytes=sum(held_bytes(spec, name, anatomy.shapes[name]) for name in own),
        trainable_bytes=sum(trained_bytes),
        largest_trainable_bytes=max(trained_bytes, default=0),
        saved=cost.saved,
        boundary=cost.output,
        transient=cost.transient,
        fresh_transient=cost.fresh_transient,
        forward_flops_per_row=cost.forward_flops,
        backward_flops_per_row=cost.backward_flops,
    )


def _bytes_of(anatomy: Anatomy, names: tuple[str, ...]) -> int:
    return sum(_FLOAT32_BYTES * torch.Size(anatomy.shapes[name]).numel() for name in names)


def _line(few: int, many: int) -> AffineBytes:
    """The line through a figure at the two row counts, its slope rounded up."""
    per_row = max(-((few - many) // (_ROWS[1] - _ROWS[0])), 0)
    return AffineBytes(fixed=max(few - per_row * _ROWS[0], 0), per_row=per_row)


def _most(options: list[AffineBytes]) -> AffineBytes:
    return max(options, key=lambda option: option.at(_ROWS[1]))
