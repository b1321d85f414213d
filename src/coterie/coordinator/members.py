"""Who has joined: the door (hello, token, version), one reader per worker, relaying between workers, silence."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from coterie.clock import Clock
from coterie.cluster.fault_messages import Leaving, MemoryLow, TrainedWants
from coterie.cluster.membership import ClusterState, Heard, Joined, Left, apply, decide
from coterie.cluster.message import Message
from coterie.cluster.messages import (
    CONTROL,
    DONE,
    GRADIENT,
    HIDDEN,
    TIED,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Welcome,
    control,
    unpack,
)
from coterie.cluster.shard_messages import ShardWants
from coterie.cluster.side_messages import TAPS
from coterie.coordinator.door import Door, lives
from coterie.coordinator.hellos import read_hello, refuse
from coterie.coordinator.inbox import Inbox
from coterie.coordinator.member import Event, Loss, Member, lost_error, reported_error, tell_end
from coterie.coordinator.plain_words import plain_words
from coterie.coordinator.too_few import too_few
from coterie.errors import CoterieError, JoinRefusedError, ProtocolError, WorkerLostError
from coterie.ids import COORDINATOR, RunId, WorkerId
from coterie.jobs.roles import WorkerRole
from coterie.logs import get_logger
from coterie.transport.frame import Frame
from coterie.transport.identity import short
from coterie.transport.server import PeerInfo, ServedLink
from coterie.units import counted

log = get_logger(__name__)

JOIN_POLL_S = 0.05

MOST_MISDEEDS = 3
"""How often a device may break the protocol and join again."""
ANSWER_S = 0.5
"""Beside one and a half heartbeats, for a sign of life to cross a slow network."""
ANSWER_LIMIT_S = 4.0
"""At most, twice: whoever knocks meanwhile is dropped by the server after ten seconds."""

_RELAYED_KINDS = (HIDDEN, GRADIENT, DONE, TIED, TAPS)
"""What workers say to each other: a worker cannot pass its own words off as the coordinator's."""


class Members(Inbox):
    """All workers of a run. The server hands it links (`admit`); the run reads what they say (`next_event`).

    Args:
        heartbeat_s: Seconds between signs of life, in both directions. A worker that computes still sends them: they
            come from its network thread.
        silence_limit_s: Silence after which a worker counts as lost.
        rejoin_s: How long a worker that loses this coordinator tries to come back.
        seats: How many workers of each role there is room for; a role that is not named has none.

    Attributes:
        on_met: Told of each worker that comes in before the run begins.
        on_joined: Told of each that comes in later.
        on_left: Told of each worker without a stage that goes, and before the run begins of any.
        on_wish: Told of what a worker asks for.
    """

    def __init__(  # noqa: PLR0913 - the last four are named at the call
        self,
        run: RunId,
        door: Door,
        clock: Clock,
        *,
        heartbeat_s: float,
        silence_limit_s: float,
        rejoin_s: float = 0.0,
        seats: Mapping[WorkerRole, int] | None = None,
    ) -> None:
        super().__init__()
        self.run = run
        self._seats = seats
        self._door = door
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._silence_limit_s = silence_limit_s
        self._rejoin_s = rejoin_s
        self._state = ClusterState()
        self._gathering = True
        self._closing = False
        self._misdeeds: Counter[str] = Counter()
        self._needed: frozenset[WorkerId] = frozenset()
        self._former: set[WorkerId] = set()
        self.by_id: dict[WorkerId, Member] = {}
        self.on_met: Callable[[Member], None] = lambda _member: None
        self.on_joined: Callable[[Member], None] = lambda _member: None
        self.on_wish: Callable[[Member, Leaving | MemoryLow], None] = lambda _member, _wish: None
        self.on_heartbeat: Callable[[Member], None] = lambda _member: None
        self.on_left: Callable[[Member, CoterieError], None] = lambda _member, _error: None

    async def admit(self, link: ServedLink, _peer: PeerInfo) -> None:
        """Serve one dialled link until it ends."""
        try:
            member = await self._greet(link)
        except CoterieError as error:
            log.info("a peer was refused: %s", error.message)
            await refuse(link, error)
            return
        await self._read(member)

    async def _greet(self, link: ServedLink) -> Member:
        hello = read_hello(await link.receive())
        former = self._door.knock(hello)
        if self._misdeeds[hello.identity or hello.name] >= MOST_MISDEEDS:
            raise JoinRefusedError(
                f"{hello.name} broke the rules of this run {MOST_MISDEEDS} times and is let in no more",
                hint="look for a damaged or changed copy of coterie on that device",
            )
        await self._settle_twin(hello)
        if self._seats is not None and not (self.survives and hello.role == "device"):
            self._check_seat(hello, self._seats.get(hello.role, 0))
        link.accept()
        worker = former if former is not None and former not in self.by_id else self._fresh_id(hello.name)
        member = Member(worker, hello, link)
        member.ticket = self._door.let_in(hello, worker)
        member.is_owner = self._door.is_own(hello)
        member.on_broken = lambda error: self._lose(member, error)
        self.by_id[worker] = member
        self._state = apply(self._state, Joined(worker=worker, at_s=self._clock.now()))
        return member

    async def _settle_twin(self, hello: Hello) -> None:
        """Two links by one identity: if the older one lives, the newcomer has a copy; if not, it has come back."""
        same = (member for member in self.by_id.values() if hello.identity and member.hello.identity == hello.identity)
        older = next(same, None)
        if older is None or older.is_gone:
            return
        if await lives(older.link, min(1.5 * self._heartbeat_s + ANSWER_S, ANSWER_LIMIT_S)):
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
        if sum(not member.is_gone for member in self.with_role(hello.role)) < seats:
            return
        self._door.turn_away(hello)
        raise JoinRefusedError(
            f"{hello.name} came as a {hello.role}, and this run has room for {counted(seats, hello.role)}",
            hint="a server joins a side-tuning run by `coterie worker LINK --role server`, every other worker without",
        )

    @property
    def owner_workers(self) -> tuple[WorkerId, ...]:
        """Those that are in and run on the data owner's own machine."""
        return tuple(member.worker for member in self.by_id.values() if member.is_owner)

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
                    rejoin_s=self._rejoin_s,
                )
            )
            (self.on_met if self._gathering else self.on_joined)(member)
            while True:
                frame = await member.link.receive()
                if member.is_gone and (self.survives or member.link.is_closed):
                    continue  # what it said before its link was cut
                self._door.heard(member.hello)
                member.bytes_heard = member.link.bytes_received
                self._state = apply(self._state, Heard(worker=member.worker, at_s=self._clock.now()))
                if frame.header.target not in (COORDINATOR, ""):
                    await self._relay(member, frame)
                else:
                    self._take(member, frame)
        except CoterieError as error:
            if isinstance(error, ProtocolError):
                self._misdeeds[member.hello.identity or member.hello.name] += 1
            self._lose(member, lost_error(member, error.message), reason=error.message)
        except Exception as error:
            self._lose(member, lost_error(member, f"{type(error).__name__}: {error}"))
            raise
        finally:
            member.has_ended.set()
            await member.link.close()

    def _lose(self, member: Member, error: CoterieError, *, reason: str = "", stays: bool = False) -> None:
        """A worker goes, or (`stays`) its stage alone.

        Before the run has begun its place is free again; afterwards that ends the run unless it goes on without
        (`go_on_without`).
        """
        if member.is_gone or self._closing:
            return
        now_s = self._clock.now()
        silent_s = self._silence_of(member, now_s)
        if not stays:
            member.is_gone = True
            self._state = apply(self._state, Left(worker=member.worker))
        if self._gathering:
            del self.by_id[member.worker]
            self._door.left_early(member.hello)
            self.on_left(member, error)
            return
        is_needed = member.worker in self._needed
        if self.survives and not stays:
            self.by_id.pop(member.worker, None)
            self._former.add(member.worker)
            self._needed -= {member.worker}  # whoever comes back under that name is new here until a plan needs it
            member.link.abort(error)
        if is_needed:
            loss = Loss(member, error, reason=reason or error.message, at_s=now_s, silent_s=silent_s, stays=stays)
            self.put_loss(loss)
        elif not stays:
            self.by_id.pop(member.worker, None)
            self.on_left(member, error)

    def _silence_of(self, member: Member, now_s: float) -> float:
        heard_s = (known.last_heard_s for known in self._state.members if known.worker == member.worker)
        return now_s - next(heard_s, now_s)

    def go_on_without(self, needed: Collection[WorkerId], plan_version: int) -> None:
        """From now on a lost worker does not end the run; the loss of one that is not `needed` only is told.

        What is said of plans before `plan_version` is not heard any more, nor what the others say, but for wishes.
        """
        self.survives = True
        self.by_id = {worker: member for worker, member in self.by_id.items() if not member.is_gone}
        self._needed = frozenset(needed)
        self.plan_version = plan_version

    def expel(self, member: Member, error: CoterieError) -> bool:
        """Treat a worker as lost because of what it said; False if the run cannot do without it."""
        if self.survives:
            self._misdeeds[member.hello.identity or member.hello.name] += 1
            self._lose(member, error)
        return self.survives

    def died(self, name: str, error: CoterieError) -> bool:
        """Somebody knows that the process of the worker called `name` has ended; False if no such worker is in."""
        member = next((member for member in self.by_id.values() if member.hello.name == name), None)
        if member is None or not self.survives:
            return False
        self._lose(member, error)
        return True

    async def _relay(self, member: Member, frame: Frame) -> None:
        """Pass a frame on between two workers that have no direct link. The source cannot be forged."""
        header = frame.header
        target = self.by_id.get(header.target)
        if target is None and header.target in self._former:
            log.info("a %s frame to %s, who is gone, was dropped", header.kind, header.target)
            return
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
        message = plain_words(unpack(frame.header.body)) if frame.header.kind == CONTROL else None
        match message:
            case Heartbeat():
                if member.beats(message, self._clock.now(), self._heartbeat_s / 4):
                    self._note_heartbeat(member)
            case Failed() if self.is_old(frame):
                log.info("a failure of an older plan came from %s", member.worker)
            case Failed():
                # One of a plan is its stage's end, not the worker's: it waits for what comes next.
                stays = self.survives and frame.header.plan_version > 0
                self._lose(member, reported_error(member, message), reason=message.message, stays=stays)
            case Goodbye(reason=reason):
                member.says_goodbye()
                self._lose(member, WorkerLostError(f"{member.hello.name} left: {reason}"), reason=reason)
            case Leaving() | MemoryLow():
                self.on_wish(member, message)
            case ShardWants() | TrainedWants():
                member.put_wants(frame.header.plan_version, message)
            case _ if self.is_old(frame):
                log.info("something of an older plan came from %s", member.worker)
            case _ if self.survives and member.worker not in self._needed:
                member.put_aside(Event(member, message, frame))
            case _:
                self.put(Event(member, message, frame))

    def _note_heartbeat(self, member: Member) -> None:
        try:
            self.on_heartbeat(member)
        except CoterieError as error:  # ours, such as a full disk: not the worker's fault
            self.post(error)

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
                raise too_few(self.by_id.values(), count, timeout_s, self._seats)
            await asyncio.sleep(JOIN_POLL_S)
        self._gathering = False
        self._needed = frozenset(self.by_id)
        return list(self.by_id.values())

    def begin_again(self, seats: Mapping[WorkerRole, int]) -> None:
        """Cut all links: whoever is still there dials again, and is waited for (`wait_for`) as before the run began."""
        for member in self.by_id.values():
            member.is_gone = True
            member.link.abort()
        self.by_id, self._state = {}, ClusterState()
        self.forget()
        self._seats, self._gathering = seats, True

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
        await tell_end(member, message)

    async def dismiss(self, message: Message) -> None:
        """Tell every worker goodbye with `message`; workers that are gone are skipped."""
        self._closing = True
        await asyncio.gather(*(tell_end(member, message) for member in tuple(self.by_id.values())))
