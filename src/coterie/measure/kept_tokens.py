"""What a block keeps of every row while text is written: its keys and values, counted without the model's weights."""

from contextlib import nullcontext

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie.jobs.model_spec import ModelSpec
from coterie.logs import get_logger
from coterie.measure.fake_stage import build_fake_stage, is_tiny
from coterie.measure.stand_in_weights import StandInWeights
from coterie.models import build_stage, describe
from coterie.models.generation import GenerationStage
from coterie.profiles.model_profile import ModelProfile

_LOG = get_logger(__name__)
_PROMPT_TOKENS = 2


def with_kept_tokens(profile: ModelProfile, spec: ModelSpec, *, tokens: int) -> ModelProfile:
    """The profile with `kept_bytes_per_row` of every unit; blocks of equal kind are counted once.

    Args:
        profile: Of the same spec.
        spec: A causal language model.
        tokens: Most tokens of a row, prompt and answer together.
    """
    kinds = describe(spec).unit_kinds
    known = {kinds[0]: 0, kinds[-1]: 0}
    with torch.random.fork_rng(devices=[]):  # real tensors draw numbers; a run's own must not depend on that
        for unit, kind in enumerate(kinds):
            if kind not in known:
                known[kind] = _count(spec, unit, tokens)
    layers = tuple(
        msgspec.structs.replace(layer, kept_bytes_per_row=known[kind])
        for layer, kind in zip(profile.layers, kinds, strict=True)
    )
    return msgspec.structs.replace(profile, layers=layers)


def _count(spec: ModelSpec, unit: int, tokens: int) -> int:
    try:
        return _count_on(spec, unit, tokens, None if is_tiny(describe(spec), tokens) else FakeTensorMode())
    except RuntimeError as error:  # torch's word for "this depends on values" is one of many RuntimeErrors
        _LOG.info("counting kept tokens on real tensors: %s", error)
        return _count_on(spec, unit, tokens, None)


def _count_on(spec: ModelSpec, unit: int, tokens: int, mode: FakeTensorMode | None) -> int:
    """Continue one row by one block and look at what it keeps."""
    embedding, block = (_build(spec, number, mode) for number in (0, unit))
    with mode or nullcontext():
        ids = torch.ones(1, _PROMPT_TOKENS, dtype=torch.long)
        hidden = embedding.forward(embedding.begin(ids, None, 1), None)
        group = block.begin(ids, None, tokens - _PROMPT_TOKENS)
        block.forward(group, hidden)
        return group.cache.bytes_at(tokens)


def _build(spec: ModelSpec, unit: int, mode: FakeTensorMode | None) -> GenerationStage:
    if mode is not None:
        return GenerationStage(build_fake_stage(spec, unit, unit + 1, mode))
    return GenerationStage(build_stage(spec, unit, unit + 1, StandInWeights(spec)))
