"""Blocks of a stage split over a device's backends: each part tried first, and left as it is where it would differ."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from coterie.heads.dealing import count_of
from coterie.heads.layout import AttentionForm, NeuronForm, Refused, attention_layout, forms_of, neuron_layout
from coterie.heads.pool import BackendPool
from coterie.heads.replaced import replaced_in
from coterie.heads.score_bias import ScoreBias
from coterie.heads.split_attention import SplitAttention
from coterie.heads.split_function import SplitLayer
from coterie.heads.split_neurons import SplitNeurons
from coterie.models import RandomKey, StageModule
from coterie.models.cut import BlockPatch
from coterie.models.stubs import hidden_result, with_hidden
from coterie.planner.head_allocation import HeadAllocation, PartAllocation

AGREES = 1e-4
"""Relative difference up to which a trial of a split block is taken for equal; those that are equal differ by 1e-6."""

_TOKENS = 5


class SplitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What of a stage is split.

    Attributes:
        attention: Numbers of the blocks whose heads are.
        neurons: Numbers of the blocks whose neurons are.
        unsplit: The others that the allocation meant: `block 3 attention` or `block 3 neurons`, with the reason.
    """

    attention: tuple[int, ...] = ()
    neurons: tuple[int, ...] = ()
    unsplit: dict[str, str] = {}

    @property
    def split_blocks(self) -> tuple[int, ...]:
        """Blocks of which any part is split."""
        return tuple(sorted({*self.attention, *self.neurons}))


class _Trial(NamedTuple):
    """What a block is called with in a small forward."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    autocast: bool


class _Recorded(Exception):  # noqa: N818 - no error: it ends a forward that has shown enough
    pass


def install_split(stage: StageModule, allocation: HeadAllocation, pool: BackendPool) -> SplitReport:
    """Splits the blocks of a stage; what was split before is taken back first.

    Only the forwards of some module instances change. Parameters, their names and their places stay as they are.
    Each part of each block is tried on a few random tokens, and runs unsplit if that differs.

    Args:
        stage: Filled, with adapters injected if there are any.
        allocation: Who computes how many heads and neurons of each block.
        pool: The backends that it names.
    """
    remove_split(stage, pool)
    blocks = dict(_blocks(stage.module))
    if not blocks:
        return SplitReport()
    wanted = {"attention": allocation.attention, "neurons": allocation.neurons}
    splits: dict[str, list[int]] = {"attention": [], "neurons": []}
    unsplit: dict[str, str] = {}
    bias = ScoreBias()
    with _quiet(stage):
        trials = _trials(stage, blocks)
        for number, block in blocks.items():
            expected = [_output(block, trial) for trial in trials[number]]
            for part, shares in wanted.items():
                if shares is None:
                    continue
                try:
                    _split(block, shares, pool, _Place(part, bias, trials[number], expected, stage.module))
                except Refused as reason:
                    unsplit[f"block {number} {part}"] = str(reason)
                else:
                    splits[part].append(number)
    return SplitReport(attention=tuple(splits["attention"]), neurons=tuple(splits["neurons"]), unsplit=unsplit)


def remove_split(stage: StageModule, pool: BackendPool) -> None:
    """Takes back what `install_split` has done."""
    installed = replaced_in(stage.module)
    for one in reversed(installed):
        one.remove()
    if installed:
        pool.unload()


class _Place(NamedTuple):
    """What splitting one part of one block needs beside the block and the shares."""

    part: str
    bias: ScoreBias
    trials: list[_Trial]
    expected: list[Tensor]
    model: nn.Module


def _split(block: nn.Module, shares: PartAllocation, pool: BackendPool, place: _Place) -> None:
    """Splits one part, or leaves the block as it was.

    Raises:
        Refused: It cannot be split.
    """
    if any(trial.autocast for trial in place.trials):
        raise Refused("the stage computes in bfloat16, and shares are computed in float32")
    model_type = getattr(getattr(place.model, "config", None), "model_type", "")
    attention, neurons = forms_of(str(model_type))
    split = (
        _attention(block, attention, shares, pool, place)
        if place.part == "attention"
        else _neurons(block, neurons, shares, pool)
    )
    for one in split.replaced:
        one.put()
    errors = [
        _difference(_output(block, trial), expected)
        for trial, expected in zip(place.trials, place.expected, strict=True)
    ]
    if not max(errors) <= AGREES:
        for one in split.replaced:
            one.remove()
        raise Refused(f"a trial of it in shares differs by {max(errors):.0e} from the block itself")


def _attention(
    block: nn.Module, form: AttentionForm, shares: PartAllocation, pool: BackendPool, place: _Place
) -> SplitAttention:
    layout = attention_layout(block, form, _cosines(place.trials[0].kwargs))
    _check_count(count_of(layout.shape), shares, "KV groups")
    return SplitAttention(layout, SplitLayer(pool, layout.shape, shares.shares), place.bias)


def _neurons(block: nn.Module, form: NeuronForm, shares: PartAllocation, pool: BackendPool) -> SplitNeurons:
    layout = neuron_layout(block, form)
    _check_count(count_of(layout.shape), shares, "neurons")
    return SplitNeurons(layout, SplitLayer(pool, layout.shape, shares.shares))


def _check_count(own: int, shares: PartAllocation, what: str) -> None:
    dealt = sum(share.count for share in shares.shares)
    if dealt != own:
        raise Refused(f"it has {own} {what}, and the allocation deals out {dealt}")


def _cosines(kwargs: Mapping[str, object]) -> Tensor | None:
    tables = kwargs.get("position_embeddings")
    return tables[0] if isinstance(tables, tuple) and isinstance(tables[0], Tensor) else None


def _blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The stage's own blocks, by number."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), BlockPatch):
            yield int(name.rpartition(".")[2]), module


@contextmanager
def _quiet(stage: StageModule) -> Iterator[None]:
    """Without dropout, gradients, or a trace in torch's generator."""
    was_training = stage.module.training
    stage.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        if was_training:
            stage.train()


def _trials(stage: StageModule, blocks: Mapping[int, nn.Module]) -> dict[int, list[_Trial]]:
    """How the model's own code calls each block, for rows with and without padding."""
    found: dict[int, list[_Trial]] = {number: [] for number in blocks}
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
    trials: list[_Trial], patch: Callable[..., object], hidden: Tensor, *, is_last: bool
) -> Callable[..., object]:
    """In the place of a block's forward: notes what it is called with."""

    def record(*args: object, **kwargs: object) -> object:
        autocast = torch.is_autocast_enabled(hidden.device.type)
        trials.append(_Trial(*with_hidden(hidden, args, kwargs), autocast))
        if is_last:
            raise _Recorded
        return patch(*args, **kwargs)

    return record


def _output(block: nn.Module, trial: _Trial) -> Tensor:
    """The block by its class's own forward, without what a stage does around it."""
    return hidden_result(type(block).forward(block, *trial.args, **trial.kwargs))


def _difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / (expected.norm() + torch.finfo(torch.float32).tiny))
