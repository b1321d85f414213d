"""Who is in, and when silence means a worker is lost: `apply(state, event)` and `decide(state, now)`, both pure."""

from typing import assert_never

import msgspec

from coterie.ids import WorkerId


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the coordinator sees it; times are the clock's seconds."""

    worker: WorkerId
    last_heard_s: float


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """All workers that are in."""

    members: tuple[MemberState, ...] = ()


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a worker was let in."""

    worker: WorkerId
    at_s: float


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a frame of any kind arrived from a worker."""

    worker: WorkerId
    at_s: float


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a worker said goodbye or its link ended."""

    worker: WorkerId


Event = Joined | Heard | Left


class DeclareLost(msgspec.Struct, frozen=True, kw_only=True):
    """Command: treat this worker as lost; it has been silent for `silent_s`."""

    worker: WorkerId
    silent_s: float


def apply(state: ClusterState, event: Event) -> ClusterState:
    """The state after an event. News of a worker that is not in changes nothing (it may have left meanwhile)."""
    match event:
        case Joined(worker=worker, at_s=at_s):
            others = tuple(member for member in state.members if member.worker != worker)
            return ClusterState(members=(*others, MemberState(worker=worker, last_heard_s=at_s)))
        case Heard(worker=worker, at_s=at_s):
            return ClusterState(
                members=tuple(
                    MemberState(worker=worker, last_heard_s=max(at_s, member.last_heard_s))
                    if member.worker == worker
                    else member
                    for member in state.members
                )
            )
        case Left(worker=worker):
            return ClusterState(members=tuple(member for member in state.members if member.worker != worker))
        case _:
            assert_never(event)


def decide(state: ClusterState, now_s: float, silence_limit_s: float) -> tuple[DeclareLost, ...]:
    """Who has been silent for longer than the limit."""
    return tuple(
        DeclareLost(worker=member.worker, silent_s=now_s - member.last_heard_s)
        for member in state.members
        if now_s - member.last_heard_s > silence_limit_s
    )
