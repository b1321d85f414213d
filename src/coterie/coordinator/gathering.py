"""Facts about who has joined: each device measured in turn, then each link, so that nobody disturbs a measurement."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from coterie.cluster.message import Message
from coterie.cluster.messages import LinksMeasured, MeasureLinks, PeerAddress, Profiled, ProfileRequest
from coterie.config.cluster_section import ClusterSection
from coterie.coordinator.inbox import NEWS_S
from coterie.coordinator.kept import TAKES, kept_note
from coterie.coordinator.losses import take_losses
from coterie.coordinator.member import ANSWER_POLL_S, Loss, Member
from coterie.coordinator.members import Members
from coterie.coordinator.observer import RunObserver
from coterie.errors import BackendError, CoterieError, ProtocolError, WorkerLostError
from coterie.ids import WorkerId
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile
from coterie.units import counted

_Answer = TypeVar("_Answer", bound=Message)


class Gathering:
    """What is asked of all workers before a run begins. In one that goes on without lost workers, they are left out.

    Args:
        members: Who is in.
        request: What each device is asked to measure.
        observer: Told what happens.
        token: Workers show it to each other.
    """

    def __init__(self, members: Members, request: ProfileRequest, observer: RunObserver, token: str) -> None:
        self._members = members
        self._request = request
        self._observer = observer
        self._token = token
        self._last: Loss | None = None

    async def measure_enough(
        self, least: int, cluster: ClusterSection, deaths: Mapping[str, CoterieError]
    ) -> ClusterProfile:
        """See `measure`; where fewer than `least` devices are left, others are waited for.

        Args:
            least: So many must be measured.
            cluster: Says how long, and whether anybody can come at all.
            deaths: By name how processes of workers ended.

        Raises:
            CoterieError: What cannot be borne, or nobody has come.
        """
        found = await self.measure({})
        while self._last is not None and len(found.devices) < least:
            if isinstance(self._last.error, BackendError):  # its owner asked for what that device has not
                raise self._last.error
            if cluster.all_local:  # nobody starts the lost ones again
                await asyncio.sleep(NEWS_S)
                raise deaths.get(self._last.member.hello.name, self._last.error)
            here = counted(least, "device")
            self._observer.notice(f"waiting for others: {len(self._members.by_id)} of {here} are left")
            await self._members.wait_for(least, cluster.join_timeout_s)
            found = await self.measure({device.worker: device for device in found.devices})
        return found

    async def measure(self, known: Mapping[WorkerId, DeviceProfile]) -> ClusterProfile:
        """Profiles of all devices and of the links between them, and to the server if there is one.

        A pair of workers without a direct link is left out of `links`: its frames go through the coordinator.

        Args:
            known: Devices that have been measured, and need not be again.

        Raises:
            CoterieError: A worker failed or left, and the run cannot do without it.
        """
        # In the order of their names: who dials first must not decide which device gets which of the recipe's own cuts.
        joined = sorted(self._members.with_role("device"), key=lambda member: member.hello.name)
        servers = self._members.with_role("server")
        devices = {member.worker: known.get(member.worker) or await self._measured(member) for member in joined}
        present = [member for member in (*joined, *servers) if not member.is_gone]
        # A server comes last: devices dial it.
        links = await self._measure_links(present) if len(present) > 1 else ()
        self._bear()
        here = {member.worker for member in present if not member.is_gone}
        return ClusterProfile(
            devices=tuple(device for worker, device in devices.items() if device is not None and worker in here),
            links=tuple(link for link in links if {link.source, link.target} <= here),
        )

    async def _measured(self, member: Member) -> DeviceProfile | None:
        name = member.hello.name
        self._observer.notice(f"measuring {name} ({TAKES})")
        answer = await self._ask(member, self._request, Profiled)
        if answer is None:
            return None
        if answer.age_s:
            self._observer.notice(kept_note(name, answer.profile, answer.age_s))
        return _own(answer, member)

    async def _measure_links(self, joined: list[Member]) -> tuple[LinkProfile, ...]:
        links: list[LinkProfile] = []
        # First tell all of them whom to let in; the last one dials nobody.
        for member in reversed(joined):
            later = joined[joined.index(member) + 1 :]
            peers = tuple(_address(other) for other in later if not other.is_gone)
            question = MeasureLinks(run=self._members.run, peers=peers, peer_token=self._token)
            answer = await self._ask(member, question, LinksMeasured)
            if answer is None:
                continue
            links.extend(_own_links(answer, member, peers))
            for failure in answer.failures:
                self._observer.notice(f"{member.hello.name} goes through the coordinator to {failure}")
        return tuple(links)

    async def _ask(self, member: Member, question: Message, kind: type[_Answer]) -> _Answer | None:
        """What a worker says to a question; None if it has gone, and the run can do without it."""
        members = self._members
        with contextlib.suppress(*([WorkerLostError] if members.survives else [])):
            await member.send(question)
        while not (member.is_gone and members.survives):
            try:
                event = await members.next_event()
            except CoterieError as error:
                if not members.survives:
                    raise
                self._tell(take_losses(members, error))
                continue
            if event.member is member and isinstance(event.message, kind):
                return event.message
            misdeed = ProtocolError(
                f"{event.member.hello.name} sent {type(event.message).__name__} while {kind.__name__} "
                f"of {member.hello.name} was due"
            )
            if not members.expel(event.member, misdeed):
                raise misdeed
        return None

    def _bear(self) -> None:
        """What was lost and not noticed yet, since nobody's answer was waited for."""
        if self._members.survives and self._members.losses:
            self._tell(take_losses(self._members, self._members.losses[0].error))

    def _tell(self, losses: list[Loss]) -> None:
        for self._last in losses:
            name, why = self._last.member.hello.name, self._last.error.message
            self._observer.notice(f"{name} was lost before the run began, which does without it: {why}")


async def measure_newcomer(members: Members, member: Member, request: ProfileRequest, token: str) -> ClusterProfile:
    """The profile of one device that came in mid-run, and of its links to all others; these go on working meanwhile.

    Raises:
        CoterieError: It left, or does not say what it is asked.
    """
    await member.send(request)
    device = _own(await _aside(member, Profiled), member)
    others = [other for other in members.by_id.values() if other is not member]
    for other in others:  # one that was alone has not been told yet whom to let in
        with contextlib.suppress(WorkerLostError):  # its loss is no reason to do without the newcomer
            await other.send(MeasureLinks(run=members.run, peers=(), peer_token=token))
    peers = tuple(_address(other) for other in others)
    await member.send(MeasureLinks(run=members.run, peers=peers, peer_token=token))
    answer = await _aside(member, LinksMeasured)
    while peers and not answer.links and not answer.failures:  # told whom to let in, for another newcomer's sake
        answer = await _aside(member, LinksMeasured)
    return ClusterProfile(devices=(device,), links=_own_links(answer, member, peers))


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


def _own(answer: Profiled, member: Member) -> DeviceProfile:
    """What a device measured, as its own: it must not speak for others."""
    return msgspec.structs.replace(answer.profile, worker=member.worker)


def _own_links(answer: LinksMeasured, member: Member, peers: tuple[PeerAddress, ...]) -> tuple[LinkProfile, ...]:
    """Those between a device and those that it was to dial; of others it must not speak."""
    dialled = {frozenset((member.worker, peer.worker)) for peer in peers}
    return tuple(link for link in answer.links if frozenset((link.source, link.target)) in dialled)


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
