"""Which unit every parameter of a model belongs to: what a cut needs to know, read off the empty model."""

import functools
import hashlib
from typing import TYPE_CHECKING

import msgspec
from torch import nn

from coterie.errors import UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.models.probe import AFTER, BEFORE, BETWEEN, Probe, probe
from coterie.models.skeleton import empty_model, find_blocks
from coterie.models.source import SUPPORTED
from coterie.models.stubs import StubForm
from coterie.profiles.model_profile import UnitKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class TiedPair(msgspec.Struct, frozen=True, kw_only=True):
    """One matrix that the embedding unit and the output unit both use.

    Attributes:
        name: Its one name: in `unit_of` (as the embedding's), in weight stores and on both stages.
        embedding_slots: Names of the places that hold it in the embedding unit.
        output_slots: The same in the output unit.
    """

    name: str
    embedding_slots: tuple[str, ...]
    output_slots: tuple[str, ...]


class Anatomy(msgspec.Struct, frozen=True, kw_only=True):
    """A model as units: the embedding (0), the blocks (i + 1), the output layer (n + 1).

    Parameter names are the Hugging Face model's own; adapters are named as in PEFT's files
    (`<module>.lora_A.weight`). A parameter that is held under several names counts under the first.

    Attributes:
        unit_names: `embedding`, `block 0` ... `output layer`.
        unit_kinds: Units of equal kind have equal shapes and cost; what is trained, in them and below, is part of it.
        unit_of: The owning unit of every parameter, trained or not, adapters included; each has exactly one.
        shapes: The shape of every parameter in `unit_of`.
        trainable: Names of trained parameters, per unit.
        buffers: Unit of each buffer that checkpoints hold (rare; never trained).
        slots: Other names under which a parameter is held: `{slot: name}`.
        tied: The matrix that both ends use, if any.
        blocks_name: Module name of the list of blocks.
        stub_form: What the model's loop takes from a block.
        context_length: Most tokens in a row, or None if the model has no such limit.
        blocks_read_ids: Whether a stage of blocks alone needs the values of token ids.
    """

    unit_names: tuple[str, ...]
    unit_kinds: tuple[UnitKind, ...]
    unit_of: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    trainable: tuple[tuple[str, ...], ...]
    buffers: dict[str, int]
    slots: dict[str, str]
    tied: TiedPair | None
    blocks_name: str
    stub_form: StubForm
    context_length: int | None
    blocks_read_ids: bool = False

    @property
    def unit_count(self) -> int:
        """Blocks and the two ends."""
        return len(self.unit_names)

    @property
    def trainable_names(self) -> frozenset[str]:
        """All trained parameters."""
        return frozenset(name for unit in self.trainable for name in unit)

    @property
    def first_backward_unit(self) -> int:
        """The lowest unit with anything trained: no gradient goes below it. `unit_count` if nothing is trained."""
        return next((unit for unit, names in enumerate(self.trainable) if names), self.unit_count)

    def units_of_slot(self, slot: str) -> frozenset[int]:
        """Units that use the parameter in one place of the model; two only for the tied matrix used as a function."""
        name = self.slots.get(slot, slot)
        if self.tied is None or name != self.tied.name:
            return frozenset({self.unit_of[name]})
        output = self.unit_count - 1
        used = {
            unit
            for unit, places in ((0, self.tied.embedding_slots), (output, self.tied.output_slots))
            if slot in places
        }
        return frozenset(used or {output})

    def unit_of_module(self, module: str) -> int:
        """The unit of a module that has a weight."""
        return max(self.units_of_slot(f"{module}.weight"))

    def names_in(self, first_unit: int, stop_unit: int) -> tuple[str, ...]:
        """Parameters that a stage of these units holds; the tied matrix for either end."""
        names = [name for name, unit in self.unit_of.items() if first_unit <= unit < stop_unit]
        if self.tied is not None and stop_unit == self.unit_count and self.tied.name not in names:
            names.append(self.tied.name)
        return tuple(names)


@functools.lru_cache(maxsize=8)
def describe(spec: ModelSpec) -> Anatomy:
    """The anatomy of a spec's model; builds it on the meta device, so no weights are read.

    Raises:
        UnsupportedModelError: The model cannot be cut; the message says why.
    """
    from coterie.models.adapters import adapter_shapes  # noqa: PLC0415 - adapters need the anatomy of blocks

    model = empty_model(spec)
    check_supported(model.config)
    blocks_name, blocks = find_blocks(model)
    seen = probe(model, blocks)
    canonical = _canonical_names(model)
    tied = _tied_pair(seen, canonical, blocks_name)
    unit_of: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        unit_of[name] = _unit(name, blocks_name, len(blocks), seen)
        shapes[name] = tuple(parameter.shape)
    if spec.lora is not None:
        for name, (module, shape) in adapter_shapes(model, spec.lora).items():
            apart = tied is not None and f"{module}.weight" in tied.output_slots
            unit_of[name] = len(blocks) + 1 if apart else unit_of[canonical[f"{module}.weight"]]
            shapes[name] = shape
    trained = _trained(spec, unit_of)
    unit_count = len(blocks) + 2
    names = ("embedding", *(f"block {i}" for i in range(len(blocks))), "output layer")
    return Anatomy(
        unit_names=names,
        unit_kinds=_kinds(blocks, blocks_name, unit_of, shapes, trained, model.config),
        unit_of=unit_of,
        shapes=shapes,
        trainable=tuple(
            tuple(n for n, u in unit_of.items() if u == unit and n in trained) for unit in range(unit_count)
        ),
        buffers=_saved_buffers(model, blocks_name, len(blocks)),
        slots={slot: name for slot, name in canonical.items() if slot != name},
        tied=tied,
        blocks_name=blocks_name,
        stub_form=seen.form,
        context_length=_context_length(model, model.config),
        blocks_read_ids=seen.blocks_read_ids,
    )


def check_supported(config: "PretrainedConfig") -> None:
    """Refuses settings under which a cut model would not compute what the whole one does."""
    for key in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        if getattr(config, key, 0.0):
            raise UnsupportedModelError(
                f"{config.model_type} is set to skip whole blocks at random ({key} = {getattr(config, key)})",
                hint=f"set {key} = 0 in the model's config",
            )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder model, which cannot be cut yet",
            hint=f"supported are {SUPPORTED}",
        )


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """`{slot: name}`: the first name of the parameter in each slot."""
    first: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    return {slot: first[id(p)] for slot, p in model.named_parameters(remove_duplicate=False)}


def _block_index(name: str, blocks_name: str) -> int | None:
    prefix = f"{blocks_name}."
    return int(name.removeprefix(prefix).split(".", 1)[0]) if name.startswith(prefix) else None


def _unit(name: str, blocks_name: str, block_count: int, seen: Probe) -> int:
    index = _block_index(name, blocks_name)
    if index is not None:
        return index + 1
    phases = seen.phases[name]
    if BETWEEN in phases:
        raise UnsupportedModelError(
            f"the parameter {name} is used between blocks, and so by every stage, which cannot be cut",
            hint=f"supported are {SUPPORTED}",
        )
    # Unused parameters (a pooler that the task does not read) travel with the output layer.
    return 0 if BEFORE in phases else block_count + 1


def _tied_pair(seen: Probe, canonical: dict[str, str], blocks_name: str) -> TiedPair | None:
    both = sorted({canonical[slot] for slot, phases in seen.phases.items() if {BEFORE, AFTER} <= phases})
    across = {
        name for slot, name in canonical.items() if _block_index(slot, blocks_name) != _block_index(name, blocks_name)
    }
    if across or len(both) > 1:
        shared = ", ".join(sorted(across | set(both)))
        raise UnsupportedModelError(
            f"units share more than the embedding matrix: {shared}", hint=f"supported are {SUPPORTED}"
        )
    if not both:
        return None
    slots = [slot for slot, name in canonical.items() if name == both[0]]
    return TiedPair(
        name=both[0],
        embedding_slots=tuple(slot for slot in slots if BEFORE in seen.slot_phases[slot]),
        output_slots=tuple(slot for slot in slots if AFTER in seen.slot_phases[slot]),
    )


def _trained(spec: ModelSpec, unit_of: dict[str, int]) -> frozenset[str]:
    if spec.method == "none":
        return frozenset()
    if spec.lora is None:
        return frozenset(unit_of) - frozenset(spec.frozen)
    saved = tuple(f"{module}." for module in spec.lora.modules_to_save)
    return frozenset(name for name in unit_of if ".lora_" in name or name.startswith(saved))


def _saved_buffers(model: nn.Module, blocks_name: str, block_count: int) -> dict[str, int]:
    kept = model.state_dict(keep_vars=True).keys() - {n for n, _ in model.named_parameters(remove_duplicate=False)}
    units: dict[str, int] = {}
    for name in sorted(kept):
        index = _block_index(name, blocks_name)
        units[name] = block_count + 1 if index is None else index + 1
    return units


def _kinds(  # noqa: PLR0917 - facts of the one description, taken apart
    blocks: nn.ModuleList,
    blocks_name: str,
    unit_of: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
    trained: frozenset[str],
    config: "PretrainedConfig",
) -> tuple[UnitKind, ...]:
    kinds: list[UnitKind] = ["embedding"]
    prefixes = [f"{blocks_name}.{index}." for index in range(len(blocks))]
    trained_in = [any(name.startswith(prefix) for name in trained) for prefix in prefixes]
    trained_below = any(unit_of[name] == 0 for name in trained)
    # Settings with one value a block, such as the kind of its attention.
    values_of = sorted(config.to_dict().items())
    per_block = [v for _, v in values_of if isinstance(v, list | tuple) and len(v) == len(blocks)]
    for index, (block, prefix) in enumerate(zip(blocks, prefixes, strict=True)):
        own = [(n.removeprefix(prefix), s, n in trained) for n, s in shapes.items() if n.startswith(prefix)]
        settings = [values[index] for values in per_block]
        # A block's backward is whole, without a gradient for what is below, or left out.
        backward = (trained_below, trained_below or trained_in[index])
        digest = hashlib.blake2b(repr((type(block).__name__, own, settings, backward)).encode(), digest_size=4)
        kinds.append(f"block-{digest.hexdigest()}")
        trained_below = trained_below or trained_in[index]
    return (*kinds, "output layer")


def _context_length(model: nn.Module, config: "PretrainedConfig") -> int | None:
    length = None
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            length = value
            break
    if length is None:
        return None
    for name, module in model.named_modules():
        # RoBERTa numbers positions from its padding index on, so that 514 rows hold 512 tokens.
        if "position" in name and isinstance(module, nn.Embedding) and module.num_embeddings == length:
            return length if module.padding_idx is None else length - module.padding_idx - 1
    return length
