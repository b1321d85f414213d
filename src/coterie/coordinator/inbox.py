"""What workers say and what is lost, in order, for whoever supervises a run."""

import asyncio

from coterie.coordinator.member import Event, Loss
from coterie.errors import CoterieError, ProtocolError, WorkerLostError
from coterie.transport.frame import Frame

NEWS_S = 0.5

MOST_UNREAD = 4096
"""Messages of one worker that wait to be read; a correct one waits for answers long before."""


class Inbox:
    """Events of workers. In a run that goes on without lost workers, a loss comes before all that was said earlier.

    That is heard after it, unless it is of an older plan by then, or whoever said it is gone.

    Attributes:
        survives: Whether the run goes on when a worker is lost.
        plan_version: Of the plan in effect: what is said of older ones is not heard any more.
        losses: Stages that are gone and of which nobody has taken note yet.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | Loss | CoterieError | None] = asyncio.Queue()
        self._outside: CoterieError | None = None
        self._unheard: Event | None = None
        self.survives = False
        self.plan_version = 0
        self.losses: list[Loss] = []

    def put(self, event: Event) -> None:
        """A worker said something.

        Raises:
            ProtocolError: It says more than anybody can read.
        """
        if event.member.unread >= MOST_UNREAD:
            raise ProtocolError(f"{event.member.hello.name} has sent {MOST_UNREAD} messages that nobody has read yet")
        event.member.unread += 1
        self._events.put_nowait(event)

    def put_loss(self, loss: Loss) -> None:
        """A worker was lost that the run needs."""
        self.losses.append(loss)
        self._events.put_nowait(loss)

    def take_losses(self) -> list[Loss]:
        """The losses that nobody has taken note of; from now on somebody has."""
        losses, self.losses = self.losses, []
        return losses

    def forget(self) -> None:
        """What was said and lost so far means nothing any more; what came from outside still does."""
        self.losses, self._unheard = [], None
        for _ in range(self._events.qsize()):
            event = self._events.get_nowait()
            if isinstance(event, CoterieError):
                self._events.put_nowait(event)

    def wake(self) -> None:
        """Let `next_event_or_wake` return: whoever waits for workers' words has something else to look at."""
        self._events.put_nowait(None)

    async def next_event(self) -> Event:
        """The next thing a worker said.

        Raises:
            CoterieError: A worker failed, left or fell silent.
        """
        while True:
            event = await self.next_event_or_wake()
            if event is not None:
                return event

    async def next_event_or_wake(self) -> Event | None:
        """The next thing a worker said, or None after `wake`; see `next_event`."""
        while True:
            event = self._unheard or await self._events.get()
            if self.survives and self.losses and not isinstance(event, CoterieError):
                if isinstance(event, Event):
                    self._unheard = event  # of another worker it may be the answer that is waited for
                raise self.losses[0].error
            if isinstance(event, Event):
                self._unheard = None
                event.member.unread -= 1
            match event:
                case Loss() if self.survives:
                    continue  # taken note of already
                case Loss():
                    if isinstance(event.error, WorkerLostError):
                        # Who started the worker's process may know what its link cannot: how it ended, or what it said.
                        await asyncio.sleep(NEWS_S)
                        raise self._outside or event.error
                    raise event.error
                case CoterieError():
                    raise event
                case Event() if self.survives and (self.is_old(event.frame) or event.member.is_gone):
                    continue
                case _:
                    return event

    def post(self, error: CoterieError) -> None:
        """Let `wait_for` or `next_event` raise `error`: something outside has ended the run."""
        self._outside = error
        self._events.put_nowait(error)

    def is_old(self, frame: Frame) -> bool:
        """Whether it belongs to a plan that is no longer in effect."""
        return 0 < frame.header.plan_version < self.plan_version
