"""Weights for stages that are only measured: right shapes, no meaning, nothing read from disk."""

from collections.abc import Iterable

import torch

from coterie.jobs.model_spec import ModelSpec
from coterie.models import describe
from coterie.models.frozen_weights import SCALES, frozen_matrices
from coterie.models.skeleton import empty_model

_SCALE = 0.02
"""Like a freshly initialised transformer: neither overflow nor denormal numbers, which would distort timings."""


class StandInWeights:
    """A `WeightStore` of small random numbers, equal on every call; in a fake tensor mode they take no memory."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._shapes = describe(spec).shapes
        self._parts = {n: layout for matrix in frozen_matrices(spec).values() for n, layout in matrix.parts.items()}

    def get(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See `coterie.models.WeightStore.get`."""
        return {name: self._make(name) for name in names}

    def _make(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        if name in self._shapes:
            return torch.empty(self._shapes[name]).normal_(std=_SCALE, generator=generator)
        if name in self._parts:
            dtype, shape = self._parts[name]
            if name.endswith(SCALES):
                return torch.full(shape, _SCALE, dtype=dtype)
            made = torch.empty(shape, dtype=dtype)
            return made.random_(0, 256, generator=generator) if dtype == torch.uint8 else made.fill_(_SCALE)
        buffer = empty_model(self._spec).get_buffer(name)  # few models keep buffers in their checkpoints
        return torch.zeros(buffer.shape, dtype=buffer.dtype)
