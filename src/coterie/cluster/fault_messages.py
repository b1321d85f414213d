"""The words of a run that goes on through failures: replicas, workers that leave, come back or run short."""

from typing import Final

import msgspec

from coterie.cluster.message import Message
from coterie.cluster.shard_messages import ShardMessage
from coterie.ids import WorkerId

REPLICA: Final = "replica"
"""Worker to coordinator, and to the worker beside it: one trained unit's tensors after the header's step.

Named and described as in a `STATE` frame; body: `UnitBody`. The header's `step` counts the optimizer steps done."""


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """How a device is, as far as it can tell; part of a `Heartbeat`. What it cannot tell is None.

    Attributes:
        battery: Charge, 0 to 1.
        on_power: Whether it is plugged in.
        watts: Power that is drawn now, of the whole device or of the processor; `watts_source` says which.
        joules: Energy since the worker joined.
        watts_source: `battery`, `rapl`, `simulated`, or `model`: what its owner stated, or a usual figure. Joined by
            `+` where the joules are from several.
        celsius: The hottest sensor.
        available_bytes: Memory that the worker could still take, by its budget and by what the machine has free.
        reserve: Charge at which its owner wants it to have nothing left to do, unless it is plugged in.
        only_on_power: Its owner lets it compute only while it is plugged in.
    """

    battery: float | None = None
    on_power: bool | None = None
    watts: float | None = None
    joules: float | None = None
    watts_source: str = ""
    celsius: float | None = None
    available_bytes: int | None = None
    reserve: float = 0.2
    only_on_power: bool = False


class Replicated(Message, frozen=True, kw_only=True):
    """All `REPLICA` frames of this stage for the state after `step` optimizer steps are out."""

    step: int


class Leaving(Message, frozen=True, kw_only=True):
    """A worker asks to be released: its layers are moved first, then it is sent `Stop`."""

    reason: str


class MemoryLow(Message, frozen=True, kw_only=True):
    """A worker may use less memory than its plan counts with, or (`limit_bytes` higher than planned) more again.

    Attributes:
        limit_bytes: What its process may use in all from now on.
        recomputes: It has already begun to recompute by itself, which changes no number.
    """

    limit_bytes: int
    reason: str
    recomputes: bool = False


class StandBy(Message, frozen=True, kw_only=True):
    """The plan that takes effect has no stage for this worker: drop the stage, keep what is cached, stay joined."""

    plan_version: int
    reason: str = ""


class Standing(Message, frozen=True, kw_only=True):
    """The answer to `StandBy`: nothing of an older plan is computed or sent any more."""

    plan_version: int


class TrainedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """The trained state of one unit, told by the SHA-256 of all its tensors, in hex."""

    unit: int
    digest: str


class CopyTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage does with copies of trained state, beside sending its own to the coordinator; part of an `Assign`.

    Attributes:
        peer: The worker that is sent them too, if there is a direct link to it; empty: none.
        sources: The workers whose copies come here. Nobody else's are taken, nor of other units than their stages'.
        limit_bytes: What its own copies of all steps may take together, and those of others once more; 0: none are
            kept.
        begins_with: The trained state that the stage begins with, of units that the worker may have copies of. It
            answers with `TrainedWants` when this is not empty.
    """

    peer: WorkerId = WorkerId("")
    sources: tuple[WorkerId, ...] = ()
    limit_bytes: int = 0
    begins_with: tuple[TrainedUnit, ...] = ()


class TrainedWants(Message, frozen=True, kw_only=True):
    """Those units of `CopyTerms.begins_with` whose trained state must be sent: there is no copy, or another one."""

    units: tuple[int, ...]


class Committed(Message, frozen=True, kw_only=True):
    """Coordinator to stages: the state after `step` steps is whole there, so that copies of older ones can go."""

    step: int


FaultMessage = Replicated | Leaving | MemoryLow | StandBy | Standing | TrainedWants | Committed | ShardMessage
