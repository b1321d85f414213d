"""Cutting: what is outside of a stage becomes stubs, what is inside is filled, and every block draws its own numbers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from coterie.errors import ModelError
from coterie.models.adapters import clean_name
from coterie.models.anatomy import Anatomy
from coterie.models.keys import RandomKey, seed_for, seed_generators
from coterie.models.stubs import BlockStub, ReachedExit, hidden_result, leave, pass_through, with_hidden

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Slots = dict[str, list[tuple[nn.Module, str]]]
"""Per parameter name, the places (module, attribute) that hold it in a stage."""


class Call(NamedTuple):
    """One forward's own facts."""

    hidden: torch.Tensor | None
    key: RandomKey
    recompute: bool


class Caller(Protocol):
    """Knows the forward that runs now."""

    @property
    def call(self) -> Call:
        """The forward that runs now."""
        ...


def cut_blocks(model: "PreTrainedModel", anatomy: Anatomy, units: range, caller: Caller) -> None:
    """Puts stubs in the places of the blocks outside `units`, whose modules are dropped."""
    blocks = model.get_submodule(anatomy.blocks_name)
    assert isinstance(blocks, nn.ModuleList)
    output_alone = units.start == anatomy.unit_count - 1

    def receive(_made_here: torch.Tensor) -> torch.Tensor:
        hidden = caller.call.hidden
        assert hidden is not None
        seed_generators(seed_for(caller.call.key, anatomy.unit_count - 1), hidden.device)
        return hidden

    for index, block in enumerate(list(blocks)):
        if index + 1 in units:
            continue
        act = leave if index + 1 >= units.stop else pass_through
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


def patch_blocks(
    model: "PreTrainedModel", anatomy: Anatomy, units: range, caller: Caller, device: torch.device
) -> None:
    """Patches each own block's forward, on the instance, to seed its randomness and to be recomputed when asked.

    The first own block takes the received hidden states instead of those made here. The last block of the model ends
    the forward if the output layer is elsewhere, and else seeds the output layer.
    """
    blocks = model.get_submodule(anatomy.blocks_name)
    assert isinstance(blocks, nn.ModuleList)
    for index, block in enumerate(blocks):
        if index + 1 in units:
            _patch_block(block, index + 1, anatomy.unit_count, units, caller, device)


def _patch_block(
    block: nn.Module, unit: int, unit_count: int, units: range, caller: Caller, device: torch.device
) -> None:
    original = block.forward
    enters = unit == units.start
    output_unit = unit_count - 1
    ends = unit == output_unit - 1

    def forward(*args: object, **kwargs: object) -> object:
        call = caller.call
        key = call.key

        # A recomputation runs this again in backward, when other forwards have come and gone: it must bind this key.
        def seeded(*args: object, **kwargs: object) -> object:
            seed_generators(seed_for(key, unit), device)
            return original(*args, **kwargs)

        if enters:
            assert call.hidden is not None
            args, kwargs = with_hidden(call.hidden, args, kwargs)
        if call.recompute and torch.is_grad_enabled():
            # No saving of generator states: the block seeds itself.
            output = checkpoint(seeded, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        else:
            output = seeded(*args, **kwargs)
        if ends and output_unit not in units:
            raise ReachedExit(hidden_result(output))
        if ends:
            seed_generators(seed_for(key, output_unit), device)
        return output

    block.forward = forward
