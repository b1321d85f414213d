"""Blocks of a stage split over a device's backends: each part tried first, and left as it is where it would differ."""

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
from coterie.heads.trials import Trial, cosines_of, output_of, own_blocks, quiet, trials_of
from coterie.models import StageModule
from coterie.planner.head_allocation import HeadAllocation, PartAllocation

AGREES = 1e-4
"""Relative difference up to which a trial of a split block is taken for equal; those that are equal differ by 1e-6."""


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
    blocks = dict(own_blocks(stage.module))
    if not blocks:
        return SplitReport()
    wanted = {"attention": allocation.attention, "neurons": allocation.neurons}
    splits: dict[str, list[int]] = {"attention": [], "neurons": []}
    unsplit: dict[str, str] = {}
    bias = ScoreBias()
    with quiet(stage):
        trials = trials_of(stage, blocks)
        for number, block in blocks.items():
            expected = [output_of(block, trial) for trial in trials[number]]
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
    trials: list[Trial]
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
        _difference(output_of(block, trial), expected)
        for trial, expected in zip(place.trials, place.expected, strict=True)
    ]
    if not max(errors) <= AGREES:
        for one in split.replaced:
            one.remove()
        raise Refused(f"a trial of it in shares differs by {max(errors):.0e} from the block itself")


def _attention(
    block: nn.Module, form: AttentionForm, shares: PartAllocation, pool: BackendPool, place: _Place
) -> SplitAttention:
    layout = attention_layout(block, form, cosines_of(place.trials[0]))
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


def _difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / (expected.norm() + torch.finfo(torch.float32).tiny))
