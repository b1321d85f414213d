"""Cutting: what is outside of a stage becomes stubs, what is inside is filled, every block draws its own numbers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from coterie.errors import ModelError
from coterie.models.adapters import clean_name
from coterie.models.anatomy import Anatomy
from coterie.models.keys import RandomKey, seed_for, seed_generators
from coterie.models.stubs import (
    Act,
    BlockStub,
    ReachedExit,
    hidden_argument,
    hidden_result,
    leave,
    pass_through,
    with_hidden,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Slots = dict[str, list[tuple[nn.Module, str]]]
"""Per parameter name, the places (module, attribute) that hold it in a stage."""


class Call(NamedTuple):
    """One forward's own facts."""

    hidden: torch.Tensor | None
    key: RandomKey
    recompute: bool


class Borders(Protocol):
    """What stubs and blocks must know of their stage."""

    first_unit: int
    unit_count: int
    is_last: bool

    @property
    def call(self) -> Call:
        """The forward that runs now."""
        ...


def cut_blocks(model: "PreTrainedModel", anatomy: Anatomy, units: range, stage: Borders) -> None:
    """Puts stubs in the places of the blocks outside `units`, whose modules are dropped."""
    blocks = model.get_submodule(anatomy.blocks_name)
    assert isinstance(blocks, nn.ModuleList)
    output_alone = units.start == anatomy.unit_count - 1

    def receive(_made_here: torch.Tensor) -> torch.Tensor:
        hidden = stage.call.hidden
        assert hidden is not None
        seed_generators(seed_for(stage.call.key, anatomy.unit_count - 1), hidden.device)
        return hidden

    for index, block in enumerate(list(blocks)):
        if index + 1 in units:
            continue
        act: Act = leave if index + 1 >= units.stop else pass_through
        if output_alone and index == len(blocks) - 1:
            act = receive
        blocks[index] = BlockStub(block, anatomy.stub_form, act)


def find_slots(model: nn.Module, anatomy: Anatomy, units: range) -> tuple[Slots, Slots]:
    """Own places, by parameter name, and the embedding unit's foreign ones, which a later stage passes through."""
    own: Slots = defaultdict(list)
    before: Slots = defaultdict(list)
    for owner_name, owner in model.named_modules():
        for leaf in owner._parameters:  # noqa: SLF001 - places, which `parameters()` does not show for tied ones
            if owner._parameters[leaf] is None:  # noqa: SLF001 - see above
                continue
            slot = clean_name(f"{owner_name}.{leaf}" if owner_name else leaf)
            used_by = anatomy.units_of_slot(slot)
            if used_by & set(units):
                own[anatomy.slots.get(slot, slot)].append((owner, leaf))
            elif 0 in used_by:
                before[anatomy.slots.get(slot, slot)].append((owner, leaf))
    return own, before


def fill_foreign(slots: Slots, device: torch.device) -> None:
    """Gives foreign parameters before the blocks a value that takes no memory: zeros of stride zero.

    The model's code runs over them and its result is replaced by the received hidden states. Foreign parameters after
    the blocks are never reached and stay on the meta device.
    """
    for places in slots.values():
        for owner, leaf in places:
            empty = owner._parameters[leaf]  # noqa: SLF001 - the place itself
            assert empty is not None
            zeros = torch.zeros((), device=device).expand(empty.shape)
            owner._parameters[leaf] = nn.Parameter(zeros, requires_grad=False)  # noqa: SLF001 - the place itself


def install(slots: Slots, tensors: dict[str, torch.Tensor], trained: Iterable[str], device: torch.device) -> None:
    """Makes parameters of `tensors`, one per name, and empties the mapping so that nothing is held twice.

    Raises:
        ModelError: A tensor has another shape than the model's.
    """
    trained = frozenset(trained)
    while tensors:
        name, tensor = tensors.popitem()
        owner, leaf = slots[name][0]
        empty = owner._parameters[leaf]  # noqa: SLF001 - the place itself
        assert empty is not None
        if tensor.shape != empty.shape:
            raise ModelError(
                f"{name} has shape {tuple(tensor.shape)}, and {tuple(empty.shape)} in the model's config",
                hint="the weights belong to another model",
            )
        put(slots, {name: nn.Parameter(tensor.to(device), requires_grad=name in trained)})


def put(slots: Slots, parameters: Mapping[str, nn.Parameter]) -> None:
    """Puts parameters in their places, without the checks of registration."""
    for name, parameter in parameters.items():
        for owner, leaf in slots[name]:
            owner._parameters[leaf] = parameter  # noqa: SLF001 - the place itself


class BlockPatch:
    """A block's forward that seeds its randomness, is recomputed when asked, and stands at the stage's borders.

    Attributes:
        watch: Is shown the block's result [B,T,D] in every forward, if it is set.
    """

    def __init__(self, block: nn.Module, unit: int, stage: "Borders", device: torch.device) -> None:
        """Wraps the forward that `block` has now."""
        self._forward = block.forward
        self._unit = unit
        self._stage = stage
        self._device = device
        self._enters = unit == stage.first_unit
        self._output_unit = stage.unit_count - 1
        self._ends = unit == self._output_unit - 1
        self._is_trained = any(parameter.requires_grad for parameter in block.parameters())
        self.watch: Callable[[torch.Tensor], None] | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Runs the block; its first argument is replaced where the stage begins with it."""
        call = self._stage.call
        key = call.key

        # A recomputation runs this in backward, when other forwards have come and gone: it binds this forward's key.
        def seeded(*args: object, **kwargs: object) -> object:
            seed_generators(seed_for(key, self._unit), self._device)
            return self._forward(*args, **kwargs)

        if self._enters:
            assert call.hidden is not None
            args, kwargs = with_hidden(call.hidden, args, kwargs)
        # Below everything that is trained there is no backward, and so nothing to recompute.
        has_backward = torch.is_grad_enabled() and (self._is_trained or hidden_argument(args, kwargs).requires_grad)
        output = _recomputed(seeded, args, kwargs) if call.recompute and has_backward else seeded(*args, **kwargs)
        if self.watch is not None:
            self.watch(hidden_result(output))
        if self._ends and not self._stage.is_last:
            raise ReachedExit(hidden_result(output))
        if self._ends:
            seed_generators(seed_for(key, self._output_unit), self._device)
        return output


def patch_blocks(model: "PreTrainedModel", anatomy: Anatomy, stage: "Borders", device: torch.device) -> None:
    """Patches each own block's forward on the instance."""
    blocks = model.get_submodule(anatomy.blocks_name)
    assert isinstance(blocks, nn.ModuleList)
    for index, block in enumerate(blocks):
        if not isinstance(block, BlockStub):
            block.forward = BlockPatch(block, index + 1, stage, device)


def _recomputed(run: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
    """Non-reentrant recomputation; generator states need no saving, since the block seeds itself."""
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
