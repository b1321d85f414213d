"""Who has joined: the door (hello, token, version), one reader per worker, relaying between workers, silence."""

import asyncio
from collections.abc import Callable, Mapping

from coterie import __version__
from coterie.clock import Clock
from coterie.cluster.membership import ClusterState, Heard, Joined, Left, apply, decide
from coterie.cluster.message import Message
from coterie.cluster.messages import (
    CONTROL,
    DONE,
    GRADIENT,
    HIDDEN,
    TIED,
    AnyMessage,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
    control,
    unpack,
)
from coterie.cluster.side_messages import TAPS
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.coordinator.door import Door, speaks
from coterie.errors import (
    CoterieError,
    JoinRefusedError,
    NonFiniteLossError,
    ProtocolError,
    VersionMismatchError,
    WorkerLostError,
    error_from_slug,
)
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.jobs.roles import WorkerRole
from coterie.logs import get_logger
from coterie.transport.frame import Frame
from coterie.transport.identity import short
from coterie.transport.server import PeerInfo, ServedLink
from coterie.transport.stream_link import StreamLink
from coterie.units import counted

log = get_logger(__name__)

JOIN_POLL_S = 0.05
NEWS_S = 0.5
ANSWER_S = 0.5
"""Beside one and a half heartbeats, for a sign of life to cross a slow network."""
ANSWER_LIMIT_S = 8.0
"""In all: whoever knocks meanwhile is dropped by the server after ten seconds."""


_RELAYED_KINDS = (HIDDEN, GRADIENT, DONE, TIED, TAPS)
"""What workers say to each other: a worker cannot pass its own words off as the coordinator's."""


class Member:
    """One worker that is in."""

    def __init__(self, worker: WorkerId, hello: Hello, link: StreamLink) -> None:
        self.worker = worker
        self.hello = hello
        self.link = link
        self.rss_bytes = 0
        self.bytes_heard = link.bytes_received
        self.is_relaying = False
        self.is_gone = False
        self.ticket = ""

    async def send(self, message: Message) -> None:
        """Send a control message.

        Raises:
            WorkerLostError: The link is gone.
        """
        await self.send_frame(control(message, target=self.worker))

    async def send_frame(self, frame: Frame) -> None:
        """Send any frame; see `send`."""
        try:
            await self.link.send(frame)
        except CoterieError as error:
            raise WorkerLostError(f"the link to {self.hello.name} broke: {error.message}") from error


class Event:
    """Something a worker said, for the supervising loop: a message, and the frame it came in."""

    __slots__ = ("frame", "member", "message")

    def __init__(self, member: Member, message: AnyMessage | None, frame: Frame) -> None:
        self.member = member
        self.message = message
        self.frame = frame


class Members:
    """All workers of a run. The server hands it links (`admit`); the run reads what they say (`next_event`).

    Args:
        heartbeat_s: Seconds between signs of life, in both directions. A worker that computes still sends them: they
            come from its network thread.
        silence_limit_s: Silence after which a worker counts as lost.
        seats: How many workers of each role there is room for; a role that is not named has none.
    """

    def __init__(
        self,
        run: RunId,
        door: Door,
        clock: Clock,
        *,
        heartbeat_s: float,
        silence_limit_s: float,
        seats: Mapping[WorkerRole, int] | None = None,
    ) -> None:
        self.run = run
        self._seats = seats
        self._door = door
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._silence_limit_s = silence_limit_s
        self._state = ClusterState()
        self._events: asyncio.Queue[Event | CoterieError] = asyncio.Queue()
        self._outside: CoterieError | None = None
        self._gathering = True
        self._closing = False
        self.by_id: dict[WorkerId, Member] = {}
        self.on_heartbeat: Callable[[Member], None] = lambda _member: None
        self.on_left: Callable[[Member, CoterieError], None] = lambda _member, _error: None

    async def admit(self, link: ServedLink, _peer: PeerInfo) -> None:
        """Serve one dialled link until it ends."""
        try:
            member = await self._greet(link)
        except CoterieError as error:
            log.info("a peer was refused: %s", error.message)
            await _refuse(link, error)
            return
        await self._read(member)

    async def _greet(self, link: ServedLink) -> Member:
        frame = await link.receive()
        hello = unpack(frame.header.body) if frame.header.kind == CONTROL else None
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a peer began with a {frame.header.kind} frame where its hello was expected")
        if hello.wire_version != WIRE_VERSION:
            raise VersionMismatchError(
                f"{hello.name} speaks wire version {hello.wire_version} (coterie {hello.package_version}), "
                f"this coordinator speaks {WIRE_VERSION} (coterie {__version__})",
                hint="install the same version of coterie on both machines",
            )
        former = self._door.knock(hello)
        await self._settle_twin(hello)
        if self._seats is not None:
            self._check_seat(hello, self._seats.get(hello.role, 0))
        link.accept()
        worker = former if former is not None and former not in self.by_id else self._fresh_id(hello.name)
        member = Member(worker, hello, link)
        member.ticket = self._door.let_in(hello, worker)
        self.by_id[worker] = member
        self._state = apply(self._state, Joined(worker=worker, at_s=self._clock.now()))
        return member

    async def _settle_twin(self, hello: Hello) -> None:
        """Two links by one identity: if the older one lives, the newcomer has a copy; if not, it has come back."""
        older = next((member for member in self.by_id.values() if _same_device(member.hello, hello)), None)
        if older is None or older.is_gone:
            return
        if await speaks(older.link, min(1.5 * self._heartbeat_s + ANSWER_S, ANSWER_LIMIT_S)):
            self._door.turn_away(hello)
            raise JoinRefusedError(
                f"the identity {short(hello.identity)} of {hello.name} is in use by {older.hello.name}, which is in "
                f"this run: was it copied?",
                hint="give this device an identity of its own: `coterie worker LINK --identity FILE` with a new FILE",
            )
        error = WorkerLostError(f"{older.hello.name} came back over a new link: its old one was dead")
        self._lose(older, error)
        older.link.abort(error)

    def _check_seat(self, hello: Hello, seats: int) -> None:
        """One server in a run of side-tuning, none in others; and a device must not take the server's place."""
        taken = len(self.with_role(hello.role))
        if taken < seats:
            return
        self._door.turn_away(hello)
        raise JoinRefusedError(
            f"{hello.name} came as a {hello.role}, and this run has room for {counted(seats, hello.role)}",
            hint="a server joins a side-tuning run by `coterie worker LINK --role server`, every other worker without",
        )

    def with_role(self, role: WorkerRole) -> list["Member"]:
        """Those that are in and play this role."""
        return [member for member in self.by_id.values() if member.hello.role == role]

    def _fresh_id(self, name: str) -> WorkerId:
        """The device's name, with a number where two devices share one."""
        base = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)[:40] or "device"
        candidate, number = base, 2
        while candidate == COORDINATOR or WorkerId(candidate) in self.by_id:
            candidate, number = f"{base}-{number}", number + 1
        return WorkerId(candidate)

    async def _read(self, member: Member) -> None:
        """Take frames from one worker until its link ends: relay, note the time, hand the rest on."""
        try:
            await member.send(
                Welcome(
                    worker=member.worker,
                    run=self.run,
                    heartbeat_s=self._heartbeat_s,
                    silence_limit_s=self._silence_limit_s,
                    ticket=member.ticket,
                )
            )
            while True:
                frame = await member.link.receive()
                self._door.heard(member.hello)
                member.bytes_heard = member.link.bytes_received
                self._state = apply(self._state, Heard(worker=member.worker, at_s=self._clock.now()))
                if frame.header.target not in (COORDINATOR, ""):
                    await self._relay(member, frame)
                else:
                    self._take(member, frame)
        except CoterieError as error:
            self._lose(member, _lost(member, error.message))
        except Exception as error:
            self._lose(member, _lost(member, f"{type(error).__name__}: {error}"))
            raise
        finally:
            await member.link.close()

    def _lose(self, member: Member, error: CoterieError) -> None:
        """A worker goes. Before the run has begun its place is free again; afterwards that ends the run."""
        if member.is_gone or self._closing:
            return
        member.is_gone = True
        self._state = apply(self._state, Left(worker=member.worker))
        if self._gathering:
            del self.by_id[member.worker]
            self._door.left_early(member.hello)
            self.on_left(member, error)
        else:
            self._events.put_nowait(error)

    async def _relay(self, member: Member, frame: Frame) -> None:
        """Pass a frame on between two workers that have no direct link. The source cannot be forged."""
        header = frame.header
        target = self.by_id.get(header.target)
        if target is None or header.source != member.worker or header.kind not in _RELAYED_KINDS:
            raise ProtocolError(
                f"a {header.kind[:40]} frame from {header.source!r} to {header.target!r} is not passed on"
            )
        # While the target's link is slow nothing more is read from the source, which is not silent for that.
        member.is_relaying = True
        try:
            await target.send_frame(frame)
        except WorkerLostError as error:
            self._lose(target, error)
        finally:
            member.is_relaying = False

    def _take(self, member: Member, frame: Frame) -> None:
        message = unpack(frame.header.body) if frame.header.kind == CONTROL else None
        match message:
            case Heartbeat(rss_bytes=rss_bytes):
                member.rss_bytes = rss_bytes
                try:
                    self.on_heartbeat(member)
                except CoterieError as error:  # ours, such as a full disk: not the worker's fault
                    self.post(error)
            case Failed():
                self._lose(member, _reported(member, message))
            case Goodbye(reason=reason):
                self._lose(member, WorkerLostError(f"{member.hello.name} left: {reason}"))
            case _:
                self._events.put_nowait(Event(member, message, frame))

    async def wait_for(self, count: int, timeout_s: float) -> list[Member]:
        """Wait until `count` workers are in.

        Raises:
            JoinRefusedError: Fewer are in after `timeout_s`.
            CoterieError: What `post` was called with.
        """
        deadline_s = self._clock.now() + timeout_s
        while len(self.by_id) < count:
            if not self._events.empty() and isinstance(event := self._events.get_nowait(), CoterieError):
                raise event
            if self._clock.now() > deadline_s:
                raise JoinRefusedError(
                    f"{len(self.by_id)} of {counted(count, 'worker')} joined within {timeout_s:.0f} s",
                    hint="start `coterie worker LINK` on the missing devices, or lower cluster.workers",
                )
            await asyncio.sleep(JOIN_POLL_S)
        self._gathering = False
        return list(self.by_id.values())

    async def next_event(self) -> Event:
        """The next thing a worker said.

        Raises:
            CoterieError: A worker failed, left or fell silent.
        """
        event = await self._events.get()
        if isinstance(event, WorkerLostError):
            # Who started the worker's process may know what its link cannot: how it ended, or what it said last.
            await asyncio.sleep(NEWS_S)
            raise self._outside or event
        if isinstance(event, CoterieError):
            raise event
        return event

    def post(self, error: CoterieError) -> None:
        """Let `wait_for` or `next_event` raise `error`: something outside has ended the run."""
        self._outside = error
        self._events.put_nowait(error)

    def check_silence(self) -> None:
        """Give up workers that have been silent for too long. A large frame on a slow link is no silence."""
        now_s = self._clock.now()
        for member in self.by_id.values():
            received = member.link.bytes_received
            if received != member.bytes_heard or member.is_relaying:
                member.bytes_heard = received
                self._state = apply(self._state, Heard(worker=member.worker, at_s=now_s))
        for command in decide(self._state, now_s, self._silence_limit_s):
            member = self.by_id[command.worker]
            error = WorkerLostError(
                f"{member.hello.name} has been silent for {command.silent_s:.0f} s "
                f"(limit {self._silence_limit_s:.0f} s)",
                hint="check the device and its network",
            )
            self._lose(member, error)
            member.link.abort(error)  # whoever waits to send to it must not wait on

    async def beat(self) -> None:
        """Send signs of life to all workers and look for theirs, for ever; run it as a task."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.check_silence()
            await asyncio.gather(*(self._beat_once(member) for member in tuple(self.by_id.values())))

    async def _beat_once(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._heartbeat_s):  # one worker that takes nothing must not hold up the others
                await member.link.send(control(Heartbeat(), target=member.worker))
        except (CoterieError, TimeoutError):
            log.debug("no heartbeat to %s: its reader will say why", member.worker)

    async def release(self, member: Member, message: Message) -> None:
        """Let one worker go whose part is done; from here on the run does without it."""
        member.is_gone = True
        self.by_id.pop(member.worker, None)
        self._state = apply(self._state, Left(worker=member.worker))
        await _tell(member, message)

    async def dismiss(self, message: Message) -> None:
        """Tell every worker goodbye with `message`; workers that are gone are skipped."""
        self._closing = True
        await asyncio.gather(*(_tell(member, message) for member in tuple(self.by_id.values())))


def _same_device(one: Hello, other: Hello) -> bool:
    return bool(other.identity) and one.identity == other.identity


async def _tell(member: Member, message: Message) -> None:
    try:
        async with asyncio.timeout(5):
            await member.send(message)
    except (CoterieError, TimeoutError):
        log.info("%s did not hear the end of the run", member.hello.name)


def _reported(member: Member, message: Failed) -> CoterieError:
    """The error that a worker ended with, as ours."""
    error = error_from_slug(message.slug, f"{member.hello.name}: {message.message}", message.hint)
    if isinstance(error, NonFiniteLossError):
        error.step, error.micro_batch = message.step, message.micro_batch
    return error


def _lost(member: Member, why: str) -> WorkerLostError:
    return WorkerLostError(f"{member.hello.name} is gone: {why}", hint="start the worker again")


async def _refuse(link: StreamLink, error: CoterieError) -> None:
    try:
        async with asyncio.timeout(5):
            await link.send(control(Refused(slug=error.slug, message=error.message, hint=error.hint)))
    except (CoterieError, TimeoutError):
        log.info("a refused peer left before it heard why")
    await link.close()
