"""Forwards put in the places of modules' own, on the instance, and taken away again; nothing else changes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Replaced:
    """A module's forward that may fall back to its own."""

    def __init__(self, module: nn.Module, forward: Callable[..., object]) -> None:
        self.module = module
        self.own: Callable[..., object] = module.forward
        self._forward = forward
        self._before = vars(module).get("forward")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The new forward."""
        return self._forward(*args, **kwargs)

    def put(self) -> None:
        """Into the module's place."""
        self.module.forward = self

    def remove(self) -> None:
        """The module has its own forward again."""
        if self._before is None:
            del self.module.forward
        else:
            self.module.forward = self._before


def replaced_in(root: nn.Module) -> list[Replaced]:
    """All that are in place."""
    forwards = [vars(module).get("forward") for module in root.modules()]
    return [forward for forward in forwards if isinstance(forward, Replaced)]


def can_be_shared(hidden: object) -> bool:
    """Whether an input is such as backends compute: float32, and no autocast to anything else."""
    return (
        isinstance(hidden, Tensor)
        and hidden.dtype == torch.float32
        and not torch.is_autocast_enabled(hidden.device.type)
    )
