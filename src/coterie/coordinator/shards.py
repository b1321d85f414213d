"""Weights on their way: each unit's tensors to the stage that owns it, and its trained state back into a checkpoint."""

import asyncio
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from torch import Tensor

from coterie.checkpoint.shard_file import state_digest
from coterie.checkpoint.trained_state import TrainedState
from coterie.checkpoint.writing import CheckpointWriter
from coterie.cluster.fault_messages import TrainedUnit
from coterie.cluster.messages import OPTIMIZER, PARAMETER, WEIGHTS, UnitBody, pack
from coterie.coordinator.member import Member
from coterie.coordinator.shard_offers import Parts, encoded, offer_of, pieces
from coterie.errors import ProtocolError
from coterie.ids import COORDINATOR, RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.models.anatomy import Anatomy, describe
from coterie.models.frozen_weights import PackedWeights, held_names
from coterie.models.weights import WeightStore
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame, FrameHeader

Part = Literal["all", "trained", "frozen"]
"""Of a unit's tensors: those that training changes, the others, or both."""


class ShardSource:
    """Where tensors of a stage come from: trained ones from a state that is kept, if there is one; others: the model.

    Frozen matrices are packed here, once, and travel as workers hold them.
    """

    def __init__(self, spec: ModelSpec, weights: WeightStore, state: TrainedState | None) -> None:
        self._spec = spec
        self._anatomy = describe(spec)
        self._weights = PackedWeights(weights, spec)
        self._state = state
        self._reading = threading.Lock()

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that training changes."""
        return self._anatomy.trainable_names

    def read(self, unit: int, *, part: Part = "all") -> dict[str, Tensor]:
        """The tensors of one unit, named as they travel; of what is trained the optimizer's state, too.

        May be called by several threads; they read one after the other.
        """
        with self._reading:
            return self._read(unit, part)

    def trained_unit(self, unit: int) -> TrainedUnit:
        """By what a worker tells whether it has a unit's trained state; takes its time: all of it is hashed."""
        return TrainedUnit(unit=unit, digest=state_digest(self.read(unit, part="trained")))

    @property
    def trained_units(self) -> frozenset[int]:
        """Those whose state is kept with them, all of it: a matrix tied to both ends is kept with the first alone."""
        if self._state is None:
            return frozenset()
        unit_of = self._state.unit_of
        return frozenset(
            unit
            for unit in set(unit_of.values())
            if all(unit_of.get(name, unit) == unit for name in self._anatomy.names_in(unit, unit + 1))
        )

    def _read(self, unit: int, part: Part) -> dict[str, Tensor]:
        names = [*self._anatomy.names_in(unit, unit + 1)]
        if part != "all":
            names = [name for name in names if (name in self._anatomy.trainable_names) == (part == "trained")]
        if part != "trained":
            names += [name for name, owner in self._anatomy.buffers.items() if owner == unit]
        state = self._state
        saved: list[str] = [] if state is None else [name for name in names if name in state.unit_of]
        tensors = self._weights.get(held_names(self._spec, [name for name in names if name not in set(saved)]))
        named = {PARAMETER + name: tensor for name, tensor in tensors.items()}
        if state is not None:
            parameters, optimizer_state = state.read(saved)
            named |= {PARAMETER + name: tensor for name, tensor in parameters.items()}
            for name, fields in optimizer_state.items():
                named |= {f"{OPTIMIZER}{name}/{field}": tensor for field, tensor in fields.items()}
        return named


def parts_due(units: Iterable[int], held: Collection[int], kept: Collection[int]) -> dict[int, Part]:
    """What is to be sent of each unit: of those in `held` only what is trained, and of those in `kept` all but that."""
    return {
        unit: "trained" if unit in held else "frozen" if unit in kept else "all"
        for unit in units
        if unit not in held or unit not in kept
    }


async def send_stage(
    member: Member, parts: Mapping[int, Part], source: ShardSource, run: RunId, plan_version: int
) -> int:
    """Send what is due of a stage's units, one after the other; how many bytes of tensors that took."""
    sent_bytes = 0
    for unit, part in parts.items():
        sent_bytes += await send_unit(member, unit, source, run, plan_version, part=part)
    return sent_bytes


async def send_unit(
    member: Member, unit: int, source: ShardSource, run: RunId, plan_version: int, *, part: Part = "all"
) -> int:
    """Send one unit, or a part of it if there are such tensors; how many bytes that took."""
    tensors = await asyncio.to_thread(source.read, unit, part=part)
    if part != "all" and not tensors:
        return 0
    parts = encoded(tensors)
    if member.hello.keeps_shards and part != "trained":
        parts = await _without_kept(member, unit, parts, source.trained, plan_version)
    for piece in pieces(parts) if member.hello.keeps_shards else (parts,):
        header = FrameHeader(
            kind=WEIGHTS,
            source=COORDINATOR,
            target=member.worker,
            run=run,
            plan_version=plan_version,
            body=pack(UnitBody(unit=unit)),
            tensors=tuple(spec for spec, _ in piece),
        )
        await member.send_frame(Frame(header, tuple(buffer for _, buffer in piece)))
    return sum(spec.nbytes for spec, _ in parts)


async def _without_kept(member: Member, unit: int, parts: Parts, trained: Collection[str], plan_version: int) -> Parts:
    """The tensors of a unit without the frozen ones that the worker says it has."""
    offer = await asyncio.to_thread(offer_of, unit, parts, trained)
    if offer is None:
        return parts
    await member.send(offer, plan_version=plan_version)
    wants = await member.shard_wants(unit, plan_version)
    kept = {part.name for part in offer.parts} - set(wants.names)
    return [part for part in parts if part[0].name not in kept]


def keep_state(writer: CheckpointWriter, unit: int, frame: Frame) -> None:
    """Write one unit's state, as a worker sent it, into a checkpoint.

    Raises:
        ProtocolError: It is not the state of that unit.
        StorageError: It cannot be written.
    """
    parameters: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True):
        if spec.name.startswith(PARAMETER):
            parameters[spec.name.removeprefix(PARAMETER)] = decode(spec, buffer)
        elif spec.name.startswith(OPTIMIZER):
            name, _, field = spec.name.removeprefix(OPTIMIZER).rpartition("/")
            state.setdefault(name, {})[field] = decode(spec, buffer)
        else:
            raise ProtocolError(f"the state of unit {unit} came with a tensor named {spec.name[:80]!r}")
    writer.write_unit(unit, parameters, state)


def trained_shapes(anatomy: Anatomy) -> Mapping[int, Mapping[str, tuple[int, ...]]]:
    """What a checkpoint must hold: each unit's trained parameters."""
    return {
        unit: {name: anatomy.shapes[name] for name in names} for unit, names in enumerate(anatomy.trainable) if names
    }
