"""Operations of a model's units at any row length, counted by torch on fake tensors at three lengths."""

from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie.jobs.model_spec import ModelSpec
from coterie.logs import get_logger
from coterie.measure.fake_stage import build_fake_stage
from coterie.measure.stand_in_weights import StandInWeights
from coterie.measure.unit_cost import count_flops, example_inputs, run_forward
from coterie.models import StageModule, build_stage, describe
from coterie.profiles.row_flops import ModelFlops, UnitFlops, through_three

_LOG = get_logger(__name__)
_LENGTHS = (8, 16, 24)
"""Every model takes rows this long."""


def count_row_flops(spec: ModelSpec) -> ModelFlops:
    """Count forward and backward of every unit; units of equal kind once.

    A model whose forward depends on values (experts chosen by a router) runs on real random numbers instead.

    Raises:
        UnsupportedModelError: The model cannot be cut; the message says why.
    """
    kinds = describe(spec).unit_kinds
    try:
        counted = _count(spec, FakeTensorMode())
    except RuntimeError as error:  # torch's word for "this depends on values" is one of many RuntimeErrors
        _LOG.info("counting operations on real tensors: %s", error)
        counted = _count(spec, None)
    return ModelFlops(units=tuple(counted[kind] for kind in kinds))


def _count(spec: ModelSpec, mode: FakeTensorMode | None) -> dict[str, UnitFlops]:
    anatomy = describe(spec)
    embedding = _build(spec, 0, mode)
    with mode or nullcontext(), torch.no_grad():
        shown = run_forward(embedding, example_inputs(1, _LENGTHS[0]), None)
    width, dtype = shown.shape[-1], shown.dtype
    found: dict[str, UnitFlops] = {}
    for unit, kind in enumerate(anatomy.unit_kinds):
        if kind in found:
            continue
        stage = embedding if unit == 0 else _build(spec, unit, mode)
        counts = []
        for tokens in _LENGTHS:
            with mode or nullcontext(), torch.set_grad_enabled(unit >= anatomy.first_backward_unit):
                hidden = None
                if unit > 0:
                    hidden = torch.randn(1, tokens, width).to(dtype)
                    hidden.requires_grad_(unit > anatomy.first_backward_unit)
                counts.append(count_flops(stage, example_inputs(1, tokens), hidden))
        forward, backward = zip(*counts, strict=True)
        found[kind] = UnitFlops(forward=through_three(_LENGTHS, forward), backward=through_three(_LENGTHS, backward))
    return found


def _build(spec: ModelSpec, unit: int, mode: FakeTensorMode | None) -> StageModule:
    if mode is not None:
        return build_fake_stage(spec, unit, unit + 1, mode)
    return build_stage(spec, unit, unit + 1, StandInWeights(spec))
