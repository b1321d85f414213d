"""The loop of a side-tuning run: feed devices ahead, take what devices and server report, wait for what is needed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from coterie.cluster.messages import (
    PREDICTIONS,
    STATE,
    MicroBatchDone,
    RunSegment,
    StateSent,
    StepDone,
)
from coterie.cluster.side_messages import BatchStored, OnItsOwn, SideEvaluated, StageForwarded
from coterie.coordinator.ledger import Ledger
from coterie.coordinator.member import Event, Member
from coterie.coordinator.members import Members
from coterie.coordinator.side_books import SideBooks
from coterie.coordinator.side_evaluation import SideEvaluation
from coterie.coordinator.side_feeding import Due, Item, SideFeeder, device_frame, server_frame
from coterie.errors import ProtocolError
from coterie.ids import WorkerId
from coterie.transport.frame import Frame

FED_AHEAD = 2
"""Micro-batches on their way to and in each stage: no stage runs dry, and what the server has not stored stays few."""


class SidePump:
    """What is under way. Everything that workers say comes through `until`."""

    def __init__(
        self,
        members: Members,
        server: Member,
        feeder: SideFeeder,
        books: SideBooks,
        evaluations: Mapping[str, SideEvaluation],
    ) -> None:
        self._members = members
        self.server = server
        self._feeder = feeder
        self._books = books
        self._evaluations = evaluations
        self._ledger = Ledger((server.worker,))
        self._under_way: dict[int, Item] = {}
        self._forwards_due: dict[int, int] = {}
        self._base_due: dict[int, Item] = {}
        self._next_number = 0
        self.devices: tuple[Member, ...] = ()
        self.parts = 0
        self.is_additive = False
        self.steps_done = 0
        self.predictions: list[Frame] = []
        self.evaluated: dict[str, float] = {}
        self.state: list[Frame] = []
        self.has_state = False
        self.is_alone = False

    async def feed(self, due: Sequence[Due]) -> None:
        """Let the devices run micro-batches, and wait until the server has all of them."""
        if not due:
            return
        first = self._next_number
        self._next_number += len(due)
        segment = RunSegment(schedule="forward", first_step=first, steps=len(due), micro_batches=1)
        await asyncio.gather(*(device.send(segment) for device in self.devices))
        for number, one in enumerate(due, start=first):
            await self.until(lambda: len(self._under_way) < FED_AHEAD * len(self.devices) + 1)
            await self._send(self._feeder.item(number, one))
        await self.until(lambda: not self._under_way and not self._forwards_due and not self._base_due)

    async def _send(self, item: Item) -> None:
        run = self._members.run
        self._under_way[item.number] = item
        self._forwards_due[item.number] = len(self.devices)
        evaluation = self._evaluations.get(item.due.split)
        if evaluation is not None:
            evaluation.know(item)
            if self.is_additive:
                self._base_due[item.number] = item
        last = self.devices[-1]
        labels = server_frame(item, run, self.server.worker, parts=self.parts, labelled=not self.is_additive)
        await asyncio.gather(
            self.server.send_frame(labels),
            *(
                device.send_frame(device_frame(item, run, device.worker, labelled=self.is_additive and device is last))
                for device in self.devices
            ),
        )

    async def until_step(self, step: int) -> None:
        """Take events until the server has done so many optimizer steps."""
        await self.until(lambda: self.steps_done >= step)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Take events until `condition` holds.

        Raises:
            CoterieError: A worker failed, left or fell silent.
        """
        while not condition():
            self._take(await self._members.next_event())

    def _take(self, event: Event) -> None:
        if event.member is self.server:
            self._take_from_server(event)
            return
        match event.message:
            case StageForwarded() as message if event.member in self.devices and message.step in self._forwards_due:
                self._forwarded(event.member.worker, message)
            case None if event.frame.header.kind == PREDICTIONS and event.frame.header.step in self._base_due:
                self._take_base(event.frame)
            case _:
                raise _unexpected(event)

    def _forwarded(self, worker: WorkerId, message: StageForwarded) -> None:
        self._books.forwarded(worker, message)
        self._forwards_due[message.step] -= 1
        if not self._forwards_due[message.step]:
            del self._forwards_due[message.step]

    def _take_base(self, frame: Frame) -> None:
        item = self._base_due.pop(frame.header.step)
        self._evaluations[item.due.split].take_base(item, frame)

    def _take_from_server(self, event: Event) -> None:
        match event.message:
            case BatchStored() as message if message.step in self._under_way:
                item = self._under_way.pop(message.step)
                self._books.stored(message, len(item.due.rows))
            case MicroBatchDone() as message:
                self._ledger.micro_batch_done(message)
            case StepDone() as message:
                entry = self._ledger.step_done(event.member.worker, message)
                assert entry is not None
                self.steps_done = message.step + 1
                self._books.step(message.step, entry)
            case SideEvaluated(split=split, loss_sum=loss_sum):
                self.evaluated[split] = loss_sum
            case StateSent():
                self.has_state = True
            case OnItsOwn():
                self.is_alone = True
            case None if event.frame.header.kind == PREDICTIONS:
                self.predictions.append(event.frame)
            case None if event.frame.header.kind == STATE:
                self.state.append(event.frame)
            case _:
                raise _unexpected(event)


def _unexpected(event: Event) -> ProtocolError:
    what = type(event.message).__name__ if event.message is not None else event.frame.header.kind[:40]
    return ProtocolError(f"{event.member.hello.name} sent {what}, which nobody waited for")
