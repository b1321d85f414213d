"""New layers (a classifier that the checkpoint lacks) start from (seed, parameter name), whichever stage holds them."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from coterie.models.keys import seed_for_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def new_parameter(model: "PreTrainedModel", name: str, seed: int) -> torch.Tensor:
    """The starting value of one parameter, from the distribution that the model's own code gives to its layer.

    Args:
        model: The whole empty model (meta device); unchanged afterwards.
        name: The parameter.
        seed: The run's seed.
    """
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    empty = owner._parameters[leaf]  # noqa: SLF001 - the slot itself, to put the meta tensor back
    assert empty is not None
    fresh = nn.Parameter(torch.full(empty.shape, torch.nan))
    for other in model.parameters():
        other._is_hf_initialized = True  # noqa: SLF001 - transformers' own mark
    for module in model.modules():
        module._is_hf_initialized = False  # noqa: SLF001 - transformers' own mark
    owner._parameters[leaf] = fresh  # noqa: SLF001 - see above
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_for_name(seed, name))
            model.initialize_weights()
            if fresh.isnan().any():
                # The model's code has no rule for this layer.
                nn.init.normal_(fresh, std=0.02) if fresh.ndim > 1 else nn.init.zeros_(fresh)
    finally:
        owner._parameters[leaf] = empty  # noqa: SLF001 - see above
    return fresh.detach()
