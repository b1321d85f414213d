"""Facts about who has joined: each device measured in turn, then each link, so that nobody disturbs a measurement."""

import secrets
from typing import TypeVar

from coterie.cluster.message import Message
from coterie.cluster.messages import LinksMeasured, MeasureLinks, PeerAddress, Profiled, ProfileRequest
from coterie.coordinator.kept import TAKES, kept_note
from coterie.coordinator.member import Member
from coterie.coordinator.members import Members
from coterie.coordinator.observer import RunObserver
from coterie.errors import ProtocolError
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile

_Answer = TypeVar("_Answer", bound=Message)


async def measure_cluster(members: Members, request: ProfileRequest, observer: RunObserver) -> ClusterProfile:
    """Profiles of all devices and of the links between them, and to the server if there is one.

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
    links = await _measure_links(members, [*joined, *servers], observer) if len(joined) + len(servers) > 1 else ()
    return ClusterProfile(devices=tuple(devices), links=links)


async def _measure_links(members: Members, joined: list[Member], observer: RunObserver) -> tuple[LinkProfile, ...]:
    token = secrets.token_urlsafe(16)
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
