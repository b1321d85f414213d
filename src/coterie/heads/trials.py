"""A stage's own blocks, tried on a few random tokens: what the model calls them with, and what they give."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coterie.models import RandomKey, StageModule
from coterie.models.cut import BlockPatch
from coterie.models.stubs import hidden_result, with_hidden

_TOKENS = 5


class Trial(NamedTuple):
    """What a block is called with in a small forward.

    Attributes:
        args: By position.
        kwargs: By name.
        autocast: Whether the stage computes in another type than its weights have.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    autocast: bool


class _Recorded(Exception):  # noqa: N818 - no error: it ends a forward that has shown enough
    pass


def cosines_of(trial: Trial) -> Tensor | None:
    """Cosines [B or 1, T, R] of the positions that the block is given, if it is."""
    kwargs = trial.kwargs
    tables = kwargs.get("position_embeddings")
    return tables[0] if isinstance(tables, tuple) and isinstance(tables[0], Tensor) else None


def own_blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The stage's own blocks, by number."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), BlockPatch):
            yield int(name.rpartition(".")[2]), module


@contextmanager
def quiet(stage: StageModule) -> Iterator[None]:
    """Without dropout, gradients, or a trace in torch's generator."""
    was_training = stage.module.training
    stage.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        if was_training:
            stage.train()


def trials_of(stage: StageModule, blocks: Mapping[int, nn.Module]) -> dict[int, list[Trial]]:
    """How the model's own code calls each block, for rows with and without padding."""
    found: dict[int, list[Trial]] = {number: [] for number in blocks}
    config = stage.module.config
    ids = torch.arange(2 * _TOKENS, device=stage.device).view(2, _TOKENS) % config.vocab_size
    padded = torch.ones_like(ids)
    padded[1, 3:] = 0
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, _TOKENS, config.hidden_size, generator=draw).to(stage.device)
    patches = {number: block.forward for number, block in blocks.items()}
    try:
        for number, block in blocks.items():
            is_last = number == max(blocks)
            block.forward = _recorder(found[number], patches[number], hidden, is_last=is_last)
        for mask in (torch.ones_like(ids), padded):
            try:
                inputs = {"input_ids": ids, "attention_mask": mask}
                stage.forward(inputs, None if stage.is_first else hidden, RandomKey(0, 0, 0))
            except _Recorded:
                pass
    finally:
        for number, block in blocks.items():
            block.forward = patches[number]
    return found


def _recorder(
    trials: list[Trial], patch: Callable[..., object], hidden: Tensor, *, is_last: bool
) -> Callable[..., object]:
    """In the place of a block's forward: notes what it is called with."""

    def record(*args: object, **kwargs: object) -> object:
        autocast = torch.is_autocast_enabled(hidden.device.type)
        trials.append(Trial(*with_hidden(hidden, args, kwargs), autocast))
        if is_last:
            raise _Recorded
        return patch(*args, **kwargs)

    return record


def output_of(block: nn.Module, trial: Trial) -> Tensor:
    """The block by its class's own forward, without what a stage does around it."""
    return hidden_result(type(block).forward(block, *trial.args, **trial.kwargs))
