"""What stands in a model's list of blocks where another stage's block would be."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

StubForm = Literal["tensor", "tuple", "pair"]
"""What the model's own loop takes from a block: the hidden states, `(hidden,)` or `(hidden, None)`."""

BlockOutput = torch.Tensor | tuple[torch.Tensor] | tuple[torch.Tensor, None]

Act = Callable[[torch.Tensor], torch.Tensor]
"""What a stub does with the hidden states [B,T,D] that it is given."""

_PLAIN = (str, int, float, bool, type(None))


class ReachedExit(Exception):  # noqa: N818 - no error: it carries the hidden states out of the model's forward
    """The forward has reached the first block after the stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class BlockStub(nn.Module):
    """Stands for a foreign block and keeps the plain attributes that the model reads from it (its mask kind)."""

    def __init__(self, block: nn.Module, form: StubForm, act: Act) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and name != "training" and isinstance(value, _PLAIN):
                setattr(self, name, value)
        self._form = form
        self._act = act

    def forward(self, *args: object, **kwargs: object) -> BlockOutput:
        """Hands the hidden states [B,T,D] that the model passes to `act`, and returns its result as a block would."""
        hidden = self._act(hidden_argument(args, kwargs))
        match self._form:
            case "tensor":
                return hidden
            case "tuple":
                return (hidden,)
            case "pair":
                return (hidden, None)


def hidden_argument(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
    """The hidden states [B,T,D] among a block's arguments.

    Raises:
        TypeError: The model hands them over in a way that is not known here.
    """
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise TypeError("the model does not pass hidden states as its blocks' first argument")
    return hidden


def pass_through(hidden: torch.Tensor) -> torch.Tensor:
    """For blocks before the one that the stage enters after: what they return is replaced anyway."""
    return hidden


def leave(hidden: torch.Tensor) -> torch.Tensor:
    """For blocks after the stage: ends the forward."""
    raise ReachedExit(hidden)


def with_hidden(
    hidden: torch.Tensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """A block's arguments with its hidden states [B,T,D] replaced."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def hidden_result(output: object) -> torch.Tensor:
    """The hidden states [B,T,D] that a block returns, alone or first of several."""
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, torch.Tensor), "a block returned no hidden states"
    return hidden
