"""Facts about who has joined: each device measured in turn, then each link, so that nobody disturbs a measurement."""

import asyncio
import contextlib
from typing import TypeVar

from coterie.cluster.message import Message
from coterie.cluster.messages import LinksMeasured, MeasureLinks, PeerAddress, Profiled, ProfileRequest
from coterie.coordinator.kept import TAKES, kept_note
from coterie.coordinator.member import ANSWER_POLL_S, Member
from coterie.coordinator.members import Members
from coterie.coordinator.observer import RunObserver
from coterie.errors import ProtocolError, WorkerLostError
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile

_Answer = TypeVar("_Answer", bound=Message)


async def measure_cluster(
    members: Members, request: ProfileRequest, observer: RunObserver, token: str
) -> ClusterProfile:
    """Profiles of all devices and of the links between them, and to the server if there is one.

    Workers show each other `token`.

    A pair of workers without a direct link is left out of `links`: its frames go through the coordinator.

    Raises:
        CoterieError: A worker failed or left.
    """
    # In the order of their names: who dials first must not decide which device gets which of the recipe's own cuts.
    joined = sorted(members.with_role("device"), key=lambda member: member.hello.name)
    devices: list[DeviceProfile] = []
    servers = members.with_role("server")
    for member in joined:
        name = member.hello.name
        observer.notice(f"measuring {name} ({TAKES})")
        await member.send(request)
        answer = await _answer(members, member, Profiled)
        if answer.age_s:
            observer.notice(kept_note(name, answer.profile, answer.age_s))
        devices.append(answer.profile)
    # A server comes last: devices dial it.
    links: tuple[LinkProfile, ...] = ()
    if len(joined) + len(servers) > 1:
        links = await _measure_links(members, [*joined, *servers], observer, token)
    return ClusterProfile(devices=tuple(devices), links=links)


async def measure_newcomer(members: Members, member: Member, request: ProfileRequest, token: str) -> ClusterProfile:
    """The profile of one device that came in mid-run, and of its links to all others; these go on working meanwhile.

    Raises:
        CoterieError: It left, or does not say what it is asked.
    """
    await member.send(request)
    device = (await _aside(member, Profiled)).profile
    others = [other for other in members.by_id.values() if other is not member]
    for other in others:  # one that was alone has not been told yet whom to let in
        with contextlib.suppress(WorkerLostError):  # its loss is no reason to do without the newcomer
            await other.send(MeasureLinks(run=members.run, peers=(), peer_token=token))
    peers = tuple(_address(other) for other in others)
    await member.send(MeasureLinks(run=members.run, peers=peers, peer_token=token))
    return ClusterProfile(devices=(device,), links=(await _aside(member, LinksMeasured)).links)


async def _aside(member: Member, kind: type[_Answer]) -> _Answer:
    """What a worker without a stage says next of this kind.

    Raises:
        WorkerLostError: It is gone.
    """
    while not member.is_gone:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_POLL_S):
                event = await member.aside.get()
                if isinstance(event.message, kind):
                    return event.message
    raise WorkerLostError(f"{member.hello.name} has gone while it was measured")


async def _measure_links(
    members: Members, joined: list[Member], observer: RunObserver, token: str
) -> tuple[LinkProfile, ...]:
    links: list[LinkProfile] = []
    # First tell all of them whom to let in; the last one dials nobody.
    for member in reversed(joined):
        peers = tuple(_address(other) for other in joined[joined.index(member) + 1 :])
        await member.send(MeasureLinks(run=members.run, peers=peers, peer_token=token))
        answer = await _answer(members, member, LinksMeasured)
        links.extend(answer.links)
        for failure in answer.failures:
            observer.notice(f"{member.hello.name} goes through the coordinator to {failure}")
    return tuple(links)


def _address(member: Member) -> PeerAddress:
    hello = member.hello
    return PeerAddress(
        worker=member.worker,
        host_id=hello.host_id,
        hosts=hello.hosts,
        port=hello.port,
        fingerprint=hello.fingerprint,
        unix_path=hello.unix_path,
    )


async def _answer(members: Members, member: Member, kind: type[_Answer]) -> _Answer:
    event = await members.next_event()
    if event.member is not member or not isinstance(event.message, kind):
        raise ProtocolError(
            f"{event.member.hello.name} sent {type(event.message).__name__} while {kind.__name__} "
            f"of {member.hello.name} was due"
        )
    return event.message
