"""Gradient norms that are the same for every cut, and clipping by them."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 16
"""Half a megabyte in float64: stays in the second-level cache, and no tensor is ever copied whole."""

_CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


def squared_norm(tensor: Tensor) -> float:
    """Sum of squares of a tensor of any shape, in float64."""
    flat = tensor.detach().reshape(-1)
    total = 0.0
    for chunk in torch.split(flat, _CHUNK_ELEMENTS):
        wide = chunk.to(torch.float64)
        total += torch.dot(wide, wide).item()
    return total


def unit_squared_norms(
    gradients: Mapping[str, Tensor], unit_of: Callable[[str], int], *, counted_elsewhere: str | None = None
) -> dict[int, float]:
    """Sum of squares per unit; `counted_elsewhere` names the tied copy that another stage counts."""
    sums: dict[int, float] = {}
    for name, gradient in gradients.items():
        if name != counted_elsewhere:
            unit = unit_of(name)
            sums[unit] = sums.get(unit, 0.0) + squared_norm(gradient)
    return sums


def sum_in_unit_order(unit_sums: Mapping[int, float]) -> float:
    """Sum of all units' values, from the embedding up: one order for every cut."""
    return sum((unit_sums[unit] for unit in sorted(unit_sums)), 0.0)


def clip_in_place(gradients: Iterable[Tensor], squared: float, max_norm: float) -> float:
    """Scale gradients so that a gradient of square norm `squared` gets at most `max_norm`; 0 switches it off.

    Returns:
        The norm before clipping.
    """
    norm = math.sqrt(squared)
    if max_norm > 0:
        factor = max_norm / (norm + _CLIP_EPSILON)
        if factor < 1:
            for gradient in gradients:
                gradient.mul_(factor)
    return norm
