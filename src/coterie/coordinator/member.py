"""One worker as the coordinator sees it, what it says, and what is known when it is lost."""

import asyncio
import contextlib
import math
from collections.abc import Callable

from coterie.cluster.fault_messages import TrainedWants, Vitals
from coterie.cluster.message import Message
from coterie.cluster.messages import AnyMessage, Failed, Heartbeat, Hello, control
from coterie.cluster.shard_messages import ShardWants
from coterie.errors import CoterieError, NonFiniteLossError, WorkerLostError, error_from_slug
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.transport.frame import Frame
from coterie.transport.stream_link import StreamLink

log = get_logger(__name__)

ANSWER_POLL_S = 0.2
"""How often whoever waits for a worker's answer looks whether it is still there."""

MOST_ASIDE = 64
"""Messages of a worker without a stage that wait to be read; more are no correct worker's."""

FAREWELL_S = 2.0
"""How long a worker has to say goodbye when the run is over."""


class Member:
    """One worker that is in.

    Attributes:
        is_owner: Whether it runs on the data owner's own machine, started by the coordinator there.
        has_ended: Set when it has said goodbye, or its link is closed.
        has_left: Whether it has said goodbye.
        unread: Messages of it that wait to be read.
        aside: What it says while it has no stage: answers to whoever measures it.
        on_broken: Called with what broke the link, when something is sent to it in vain.
    """

    def __init__(self, worker: WorkerId, hello: Hello, link: StreamLink) -> None:
        self.worker = worker
        self.hello = hello
        self.link = link
        self.unread = 0
        self.rss_bytes = 0
        self.vitals: Vitals | None = None
        self.bytes_heard = link.bytes_received
        self.is_relaying = False
        self.is_gone = False
        self.has_ended = asyncio.Event()
        self.has_left = False
        self.ticket = ""
        self.is_owner = False
        self.aside: asyncio.Queue[Event] = asyncio.Queue(MOST_ASIDE)
        self._beat_due_s = -math.inf
        self._wants: asyncio.Queue[tuple[int, ShardWants | TrainedWants]] = asyncio.Queue(MOST_ASIDE)
        self.on_broken: Callable[[WorkerLostError], None] = lambda _error: None

    def beats(self, message: Heartbeat, now_s: float, least_pause_s: float) -> bool:
        """Take note of a heartbeat; False if it comes much sooner than agreed, and need not be written down."""
        self.rss_bytes, self.vitals = message.rss_bytes, message.vitals
        is_due = now_s >= self._beat_due_s
        if is_due:
            self._beat_due_s = now_s + least_pause_s
        return is_due

    def says_goodbye(self) -> None:
        """It leaves, and nobody waits for its link any more."""
        self.has_left = True
        self.has_ended.set()

    def put_aside(self, event: "Event") -> None:
        """Keep what it says while it has no stage, for whoever measures it; of too much the last is dropped."""
        if not self.aside.full():
            self.aside.put_nowait(event)

    def put_wants(self, plan_version: int, wants: ShardWants | TrainedWants) -> None:
        """Hand an answer to whoever offered something; of more than anybody asked for the last is dropped."""
        if not self._wants.full():
            self._wants.put_nowait((plan_version, wants))

    async def shard_wants(self, unit: int, plan_version: int) -> ShardWants:
        """The answer to an offer of one unit's shards; there is one offer at a time.

        Raises:
            WorkerLostError: The worker is gone.
        """
        while True:
            version, wants = await self._next_wants("which shards it needs")
            if isinstance(wants, ShardWants) and (version, wants.unit) == (plan_version, unit):
                return wants

    async def trained_wants(self, plan_version: int) -> TrainedWants:
        """The answer to an `Assign` that begins with trained state of which the worker may have copies.

        Raises:
            WorkerLostError: The worker is gone.
        """
        while True:
            version, wants = await self._next_wants("which trained layers it has")
            if isinstance(wants, TrainedWants) and version == plan_version:
                return wants

    async def _next_wants(self, what: str) -> tuple[int, ShardWants | TrainedWants]:
        while not self.is_gone and not self.link.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_POLL_S):
                    return await self._wants.get()
        lost = WorkerLostError(f"the link to {self.hello.name} broke before it said {what}")
        self.on_broken(lost)  # its reader may be busy, and not have noticed yet
        raise lost

    async def send(self, message: Message, *, plan_version: int = 0) -> None:
        """Send a control message; with a plan's version where it means nothing to a worker of a later plan.

        Raises:
            WorkerLostError: The link is gone.
        """
        await self.send_frame(control(message, target=self.worker, plan_version=plan_version))

    async def send_frame(self, frame: Frame) -> None:
        """Send any frame; see `send`."""
        try:
            await self.link.send(frame)
        except CoterieError as error:
            lost = WorkerLostError(f"the link to {self.hello.name} broke: {error.message}")
            self.on_broken(lost)
            raise lost from error


class Event:
    """Something a worker said, for the supervising loop: a message, and the frame it came in."""

    __slots__ = ("frame", "member", "message")

    def __init__(self, member: Member, message: AnyMessage | None, frame: Frame) -> None:
        self.member = member
        self.message = message
        self.frame = frame


class Loss:
    """A worker whose stage is gone.

    Attributes:
        error: What to end with where the loss cannot be borne.
        reason: In a few words, for people.
        at_s: When it was noticed.
        silent_s: Seconds since its last sign of life.
        stays: Only its stage is gone: it may be given a smaller one.
        has_left: It said goodbye, or was about to leave.
    """

    __slots__ = ("at_s", "error", "has_left", "member", "reason", "silent_s", "stays")

    def __init__(
        self, member: Member, error: CoterieError, *, reason: str, at_s: float, silent_s: float, stays: bool
    ) -> None:
        self.member = member
        self.error = error
        self.reason = reason
        self.at_s = at_s
        self.silent_s = silent_s
        self.stays = stays
        self.has_left = member.has_left and not stays


def reported_error(member: Member, message: Failed) -> CoterieError:
    """The error that a worker ended with, as ours."""
    error = error_from_slug(message.slug, f"{member.hello.name}: {message.message}", message.hint)
    if isinstance(error, NonFiniteLossError):
        error.step, error.micro_batch = message.step, message.micro_batch
    return error


def lost_error(member: Member, why: str) -> WorkerLostError:
    """The error that a run ends with which cannot do without a worker that is gone."""
    return WorkerLostError(f"{member.hello.name} is gone: {why}", hint="start the worker again")


async def tell_end(member: Member, message: Message) -> None:
    """Tell a worker that the run is over for it, and wait a little for its goodbye."""
    try:
        async with asyncio.timeout(5):
            await member.send(message)
        # A link that is closed with something of the worker's unread is reset, and what was sent last is lost.
        async with asyncio.timeout(FAREWELL_S):
            await member.has_ended.wait()
    except (CoterieError, TimeoutError):
        log.info("%s did not say that it heard the end of the run", member.hello.name)
