"""Weights on their way: each unit's tensors to the stage that owns it, and its trained state back into a checkpoint."""

import asyncio
import threading
from collections.abc import Collection, Mapping

from torch import Tensor

from coterie.checkpoint.trained_state import TrainedState
from coterie.checkpoint.writing import CheckpointWriter
from coterie.cluster.messages import OPTIMIZER, PARAMETER, WEIGHTS, UnitBody, pack
from coterie.coordinator.member import Member
from coterie.coordinator.shard_offers import Parts, encoded, offer_of, pieces
from coterie.errors import ProtocolError
from coterie.ids import COORDINATOR, RunId
from coterie.jobs.model_spec import ModelSpec
from coterie.models.anatomy import Anatomy, describe
from coterie.models.frozen_weights import PackedWeights, held_names
from coterie.models.weights import WeightStore
from coterie.planner.plan import Plan
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame, FrameHeader


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

    def read(self, unit: int, *, trained_only: bool = False) -> dict[str, Tensor]:
        """All tensors of one unit, named as they travel; `trained_only`: without those that training never changes.

        May be called by several threads; they read one after the other.
        """
        with self._reading:
            return self._read(unit, trained_only=trained_only)

    def _read(self, unit: int, *, trained_only: bool) -> dict[str, Tensor]:
        names = [*self._anatomy.names_in(unit, unit + 1)]
        if trained_only:
            names = [name for name in names if name in self._anatomy.trainable_names]
        else:
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


async def send_stage(
    member: Member, plan: Plan, stage: int, source: ShardSource, run: RunId, *, held: Collection[int] = ()
) -> None:
    """Send every unit of a stage, one after the other; of those in `held` what is trained, if anything is."""
    assignment = plan.stages[stage]
    for unit in range(assignment.first_unit, assignment.stop_unit):
        await send_unit(member, unit, source, run, plan.version, trained_only=unit in held)


async def send_unit(
    member: Member, unit: int, source: ShardSource, run: RunId, plan_version: int, *, trained_only: bool = False
) -> None:
    """Send one unit; nothing if only what is trained is wanted and nothing is."""
    tensors = await asyncio.to_thread(source.read, unit, trained_only=trained_only)
    if trained_only and not tensors:
        return
    parts = encoded(tensors)
    if member.hello.keeps_shards and not trained_only:
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
