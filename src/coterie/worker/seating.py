"""Which stage a worker has now, and its change into that of the next plan, or into none."""

import asyncio
from collections.abc import Awaitable, Callable

from coterie.cluster.fault_messages import Committed, StandBy, Standing, TrainedWants
from coterie.cluster.message import Message
from coterie.cluster.messages import Assign, Generate, NormTotal, RunSegment, SaveState, StageReady
from coterie.cluster.shard_messages import ShardOffer
from coterie.errors import BackendError, CoterieError, NetworkError, OutOfMemoryError, ProtocolError, WorkerLostError
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.measure.allocator import set_aside
from coterie.models.anatomy import describe
from coterie.transport.frame import Frame
from coterie.transport.stream_link import StreamLink
from coterie.worker.holdings import Holdings
from coterie.worker.last_words import explained, failed
from coterie.worker.outboxes import Outboxes
from coterie.worker.own_device import OwnDevice
from coterie.worker.peers import Peers
from coterie.worker.seat import Seat
from coterie.worker.shard_intake import ShardIntake

log = get_logger(__name__)

GIVE_UP_S = 120.0
"""How long the compute thread has to come out of what it does when another plan takes effect: one forward, at most."""

NEWS_S = 3.0
"""How long a broken link waits for the coordinator's word: it knows which worker was lost, this one does not."""

COPIES = "copies"
"""Name of the folder, beside the cached shards, with copies of trained state while a run is under way."""


class Seating:
    """Lives on the event loop, as long as one link to the coordinator.

    Args:
        device: What the worker computes with.
        peers: Its direct links to other workers.
        link: That to the coordinator.
        send: Sends a message to the coordinator, with a plan's version.
        fail: Ends the worker with an error.
    """

    def __init__(
        self,
        device: OwnDevice,
        peers: Peers,
        link: StreamLink,
        *,
        send: Callable[[Message, int], Awaitable[None]],
        fail: Callable[[CoterieError], None],
    ) -> None:
        self._say = device.say
        self._device = device
        self._peers = peers
        self._link = link
        self._send = send
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seat: Seat | None = None
        folder = device.settings.shard_cache
        self._holdings = Holdings(None if folder is None else folder / COPIES)
        self._intake = ShardIntake(device.shards)
        self._changing = asyncio.Lock()
        self._is_closed = False
        self.worker = WorkerId("")
        """This worker's name in the run, once it is known."""
        self.version = 0
        """Of the newest plan that was heard of."""
        self.trouble: CoterieError | None = None
        """What the last stage ended with, until there is another."""

    @property
    def has_stage(self) -> bool:
        """Whether anybody relies on this worker."""
        return self._seat is not None

    @property
    def can_be_moved(self) -> bool:
        """Whether there is a stage, of a run that keeps replicas and so can give it to somebody else."""
        return self._seat is not None and self._seat.assign.replicate_every > 0

    @property
    def running(self) -> Seat | None:
        """The stage, if it stands and can be adapted."""
        return self._seat if self._seat is not None and self._seat.is_running else None

    async def handle(self, message: object, frame: Frame) -> bool:
        """Whether a message was about a stage; then it has been dealt with.

        Raises:
            ProtocolError: It is for a stage that is not there.
        """
        match message:
            case Assign():
                await self._take_seat(message)
            case StandBy(plan_version=version, reason=reason):
                await self._stand_by(version, reason)
            case RunSegment() | Generate() | SaveState() | NormTotal():
                self._put_to_work(message, frame)
            case Committed(step=step):
                self._holdings.trained.committed(step)
            case ShardOffer():
                await self._take_offer(message, frame.header.plan_version)
            case _:
                return False
        return True

    def _put_to_work(self, message: RunSegment | Generate | SaveState | NormTotal, frame: Frame) -> None:
        if self._seat is None and self.trouble is not None:
            log.info("%s came for a stage that is gone", type(message).__name__)
        elif self._seat is None or not self._seat.is_built:
            raise ProtocolError(f"the coordinator sent {type(message).__name__} to a worker without a stage")
        elif isinstance(message, NormTotal):
            self._seat.put_total(message, frame)
        else:
            self._seat.submit(message)

    async def _take_seat(self, assign: Assign) -> None:
        """Give up the stage of the plan before, if there is one, and wait for the weights of this one's."""
        async with self._changing:
            self.version = assign.plan.version
            had_stage = await self._give_up()
            self._intake.forget()
            # The first look at a model imports its library: many seconds on a slow device, in which the loop must beat.
            await asyncio.to_thread(describe, assign.spec)
            await asyncio.to_thread(set_aside)
            lacking = self._holdings.lacking(assign.held_units)
            has_let_go = self._holdings.keep_only(assign.spec, set(assign.held_units) & own_units(assign))
            if had_stage or has_let_go:
                await asyncio.to_thread(self._device.free_memory)
            if lacking:
                self._holdings.clear()
                units = ", ".join(map(str, lacking))
                error = ProtocolError(f"the coordinator did not send units {units}, which are not here")
                await self._tell_trouble(error)
                return
            self._seat = Seat(
                self.worker,
                assign,
                self._device,
                Outboxes(self._link, self._peers.links),
                holdings=self._holdings,
                on_failure=self._failure_of(self.version),
            )
            self._say(self._seat.layers)
            self._holdings.trained.begin(assign)
            if assign.copies.begins_with:
                await self._begin_with_copies(self._seat)
        await self._build_if_filled()

    async def _begin_with_copies(self, seat: Seat) -> None:
        """Fill the stage with what of the trained state is here, and ask for the rest."""
        found = await asyncio.to_thread(self._holdings.trained.found, seat.assign)
        for unit, tensors in found.items():
            seat.take_tensors(unit, tensors)
        units = tuple(wanted.unit for wanted in seat.assign.copies.begins_with if wanted.unit not in found)
        await self._send(TrainedWants(units=units), seat.version)

    async def _stand_by(self, version: int, reason: str) -> None:
        async with self._changing:
            self.version = version
            await self._give_up()
            await asyncio.to_thread(self._device.free_memory)
            self.trouble = None
        self._say(f"standing by without a stage{f': {reason}' if reason else ''}")
        await self._send(Standing(plan_version=version), version)

    async def _give_up(self) -> bool:
        """End the stage; whether there was one. What it computes now comes to its end: two must not share the memory.

        Raises:
            CoterieError: It did not.
        """
        seat, self._seat = self._seat, None
        if seat is not None and not await seat.end(GIVE_UP_S):
            raise CoterieError(
                f"what stage {seat.assign.stage} computed did not come to its end within {GIVE_UP_S:.0f} s",
                hint="start the worker again",
            )
        return seat is not None

    async def take_weights(self, frame: Frame) -> None:
        """Take weights for the stage, and build it when they were the last ones."""
        seat = self._seat
        if seat is None or frame.header.plan_version != seat.version:
            log.info("weights of plan %d came, which no stage waits for", frame.header.plan_version)
            return
        await self._intake.received(frame)
        if seat is self._seat:
            seat.take_weights(frame)
            await self._build_if_filled()

    async def _take_offer(self, offer: ShardOffer, version: int) -> None:
        """Fill the stage with what of an offer is on this device's disk, and ask for the rest."""
        seat = self._seat
        if seat is None or version != seat.version:
            log.info("shards of plan %d were offered, which no stage waits for", version)
            return
        found, wants = await self._intake.offered(offer)
        if seat is self._seat:
            seat.take_tensors(offer.unit, found)
            await self._send(wants, version)
            await self._build_if_filled()

    async def _build_if_filled(self) -> None:
        seat = self._seat
        if seat is None or seat.is_built or not seat.is_filled:
            return
        async with self._changing:
            try:
                await seat.build()
            except OutOfMemoryError as error:
                await self._tell_trouble(error)
                return
            self.trouble = None
        stage, stages = seat.assign.stage, seat.assign.plan.stages
        after = stages[stage + 1].worker if stage + 1 < len(stages) else None
        link_to_next = ""
        if after is not None:
            link_to_next = self._peers.carriers[after] if after in self._peers.links else "relayed"
        await self._send(StageReady(stage=stage, link_to_next=link_to_next), seat.version)

    def take_data(self, frame: Frame) -> None:
        """Take a frame with tensors, from the coordinator or over a direct link."""
        if self._seat is None:
            log.info("a %s frame came, and there is no stage", frame.header.kind)
        else:
            self._seat.take_data(frame)

    def peer_lost(self, worker: WorkerId, error: CoterieError) -> None:
        """A direct link has ended. From the next plan on, what goes there goes through the coordinator."""
        if self._seat is not None and self._seat.talks_to(worker):
            lost = NetworkError(f"the link to {worker} ended: {error.message}")
            self._stage_failed(self._seat.version, lost)

    def _stage_failed(self, version: int, error: CoterieError) -> None:
        """The stage cannot go on. The worker can, unless it is something else than its memory, a link or a backend."""
        if self._seat is None or self._seat.version != version:
            return
        if isinstance(error, OutOfMemoryError | BackendError):
            self._drop_soon(version, error)
        elif isinstance(error, NetworkError | WorkerLostError):
            # The coordinator knows which worker was lost, this one does not: its word comes first.
            self._loop.call_later(NEWS_S, self._drop_soon, version, error)
        else:
            self._fail(error)

    def _failure_of(self, version: int) -> Callable[[CoterieError], None]:
        """What the compute thread of a plan's stage calls when it fails."""
        return lambda error: self._told_from_thread(version, error)

    def _told_from_thread(self, version: int, error: CoterieError) -> None:
        self._loop.call_soon_threadsafe(self._stage_failed, version, error)

    def _drop_soon(self, version: int, error: CoterieError) -> None:
        task = self._loop.create_task(self._drop_stage(version, error))
        self._tasks.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(explained(error))

    async def _drop_stage(self, version: int, error: CoterieError) -> None:
        """Report what went wrong, unless another plan has come meanwhile, and wait for the coordinator's word."""
        async with self._changing:
            if self._is_closed or self._seat is None or self._seat.version != version:
                return
            await self._tell_trouble(error)

    async def _tell_trouble(self, error: CoterieError) -> None:
        """Say that the stage is gone and the worker is not: a `Failed` of a plan, not of the process."""
        self.trouble = error
        self._say(f"{error.message}: waiting for what the coordinator makes of it")
        try:
            await self._send(failed(error), self.version)
        except NetworkError:
            log.info("the coordinator is gone too: its reader says so")
        await self._give_up()
        await asyncio.to_thread(self._device.free_memory)

    def wake(self) -> None:
        """Let the compute thread come to its end: the worker is about to leave."""
        if self._seat is not None:
            self._seat.wake()

    async def close(self) -> None:
        """Give up the stage and all that is held."""
        self._is_closed = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        seat, self._seat = self._seat, None
        if seat is not None:
            await seat.end()
        self._holdings.clear()


def own_units(assign: Assign) -> set[int]:
    """The units of an assigned stage."""
    place = assign.plan.stages[assign.stage]
    return set(range(place.first_unit, place.stop_unit))
