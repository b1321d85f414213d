"""The loop that keeps a pipeline of workers busy: feed micro-batches ahead, collect losses, norms and state."""

import asyncio
from collections.abc import Callable, Sequence

from coterie.cluster.fault_messages import REPLICA, Replicated
from coterie.cluster.message import Message
from coterie.cluster.messages import (
    PREDICTIONS,
    STATE,
    LinksMeasured,
    MicroBatchDone,
    NormPart,
    NormTotal,
    RunSegment,
    SaveState,
    StateSent,
    StepDone,
)
from coterie.coordinator.claims import check_claim, unit_of
from coterie.coordinator.feeding import Feeder, audiences, batch_frame
from coterie.coordinator.ledger import Ledger, StepEntry
from coterie.coordinator.member import Event, Member
from coterie.coordinator.members import Members
from coterie.coordinator.segments import Segment
from coterie.errors import InterruptedRunError, ProtocolError
from coterie.ids import WorkerId
from coterie.planner.plan import Plan
from coterie.transport.frame import Frame

FORWARD_STEPS = 1 << 40
"""Evaluation micro-batches are numbered from here on, so that they can never be taken for training's."""

FED_AHEAD = 2
"""Steps fed before they are needed: one under way, one waiting, so that no stage waits for the coordinator."""


class BrokenOffError(Exception):
    """What was under way is given up at once, since something else cannot wait: training goes on from a replica."""


class Trainer:
    """One plan being run. `on_step` is called once per finished optimizer step, in order.

    Attributes:
        stop_requested: The user wants to stop: `run` ends before the next segment, an evaluation at once.
        break_requested: `run` ends before the next segment, since something else is to be done where no step is open.
        break_off: The same at once, in the middle of what is under way: `BrokenOffError`. Call `Members.wake` after it.
        is_paused: No further step is fed; those that are fed come to their end. Call `Members.wake` after a change.
        on_replica: Takes the trained tensors of (step, unit) in a frame.
        on_idle: Called when a pause has taken effect: no step is under way.
    """

    def __init__(
        self,
        members: Members,
        plan: Plan,
        feeder: Feeder,
        on_step: Callable[[int, StepEntry], None],
        first_step: int = 0,
    ) -> None:
        self._members = members
        self.plan = plan
        self._feeder = feeder
        self._on_step = on_step
        self.stages: tuple[Member, ...] = tuple(members.by_id[stage.worker] for stage in plan.stages)
        self._audiences = audiences(plan, [member.is_owner for member in self.stages])
        self._ledger = Ledger(tuple(stage.worker for stage in plan.stages), first_step)
        self._norms: dict[int, dict[WorkerId, NormPart]] = {}
        self._completed = first_step
        self._fed = first_step
        self._next_forward_step = FORWARD_STEPS
        self._forward_base = FORWARD_STEPS
        self._forward_done: set[int] = set()
        self._forward_losses: dict[int, float] = {}
        self.stop_requested = False
        self.break_requested = False
        self.break_off = False
        self.is_paused = False
        self.on_replica: Callable[[int, int, Frame], None] = lambda _step, _unit, _frame: None
        self.on_idle: Callable[[bool], None] = lambda _idle: None

    async def tell(self, message: Message) -> None:
        """Send a message to all stages of this plan."""
        await asyncio.gather(*(member.send(message, plan_version=self.plan.version) for member in self.stages))

    async def run(self, segments: Sequence[Segment]) -> int:
        """Run segments that follow each other; the step reached, less than the last one's end if a stop was requested.

        Raises:
            CoterieError: A worker failed, left or fell silent.
        """
        self._completed = self._fed = segments[0].first_step
        for segment in segments:
            await self._wait_for_room(segment.first_step, may_break=True)
            if self.stop_requested or self.break_requested:
                await self._wait_until(segment.first_step)
                return segment.first_step
            await self._announce(segment)
            for step in range(segment.first_step, segment.stop_step):
                await self._wait_for_room(step, may_break=self._empties)
                await self._feed(self._feeder, step, step)
                self._fed = step + 1
        await self._wait_until(segments[-1].stop_step)
        return segments[-1].stop_step

    @property
    def _empties(self) -> bool:
        """Whether no step is under way after any of them, and not only after a segment."""
        return self.plan.schedule in ("flush", "gpipe")

    async def _wait_for_room(self, step: int, *, may_break: bool) -> None:
        while step - self._completed >= FED_AHEAD:
            await self._take_event()
        while self.is_paused and not self.stop_requested and not (may_break and self.break_requested):
            # Under the others what is under way waits for the next step's micro-batches; nothing is computed either.
            self.on_idle(not self._empties or self._completed == self._fed)
            await self._take_event()
        self.on_idle(False)  # noqa: FBT003 - a callback's only argument

    async def _wait_until(self, step: int) -> None:
        """Wait until all stages have ended all steps before `step`."""
        while self._completed < step:
            await self._take_event()

    async def _announce(self, segment: Segment) -> None:
        message = RunSegment(
            schedule=self.plan.schedule,
            first_step=segment.first_step,
            steps=segment.steps,
            micro_batches=self.plan.micro_batches,
        )
        await self.tell(message)

    async def _feed(self, feeder: Feeder, step: int, wire_step: int) -> None:
        for index, batch in enumerate(feeder.micro_batches(step)):
            await asyncio.gather(
                *(
                    member.send_frame(
                        batch_frame(batch, self._members.run, self.plan.version, (wire_step, index), audience)
                    )
                    for member, audience in zip(self.stages, self._audiences, strict=True)
                )
            )

    async def _take_event(self) -> Event | None:
        """Handle the next thing a worker says; returned if it is not part of training itself.

        None also when somebody wants the caller to look again, see `Members.wake`.
        """
        event = await self._members.next_event_or_wake()
        if self.break_off:
            raise BrokenOffError
        if event is None:
            return None
        try:
            return await self._handle(event)
        except ProtocolError as error:
            self._refuse(event, error)
            return None

    def _refuse(self, event: Event, error: ProtocolError) -> None:
        """Not the run's end: whoever says such things is treated as lost, and the next event says so.

        Raises:
            ProtocolError: The run cannot do without any worker.
        """
        if not self._members.expel(event.member, error):
            raise error

    async def _handle(self, event: Event) -> Event | None:
        check_claim(event, self.plan, fed=self._fed, forward=range(FORWARD_STEPS, self._next_forward_step))
        match event.message:
            case MicroBatchDone() as message if message.step >= FORWARD_STEPS:
                self._forward_losses[message.step] = message.loss_sum
            case StepDone() as message if message.step >= FORWARD_STEPS:
                if event.member is self.stages[-1] and message.step >= self._forward_base:
                    self._forward_done.add(message.step)
            case MicroBatchDone() as message:
                self._ledger.micro_batch_done(message)
            case StepDone() as message:
                entry = self._ledger.step_done(event.member.worker, message)
                if entry is not None:
                    self._completed = message.step + 1
                    self._on_step(message.step, entry)
            case NormPart() as message:
                await self._add_norm(event.member, message)
            case Replicated() | LinksMeasured():
                pass  # all its replicas are here already; a newcomer's links have been measured
            case None if event.frame.header.kind == REPLICA:
                self.on_replica(event.frame.header.step, unit_of(event), event.frame)
            case _:
                return event
        return None

    async def _add_norm(self, member: Member, message: NormPart) -> None:
        """Sum the squared norms of all stages in unit order, so that the sum does not depend on the cut."""
        if message.step < self._completed:
            return  # said twice, and answered
        parts = self._norms.setdefault(message.step, {})
        parts[member.worker] = message
        if len(parts) < len(self.stages):
            return
        del self._norms[message.step]
        total = 0.0
        for _unit, square in sorted(pair for part in parts.values() for pair in part.squares):
            total += square
        await self.tell(NormTotal(step=message.step, total=total))

    async def save_state(self, step: int, keep: Callable[[int, Frame], None]) -> None:
        """Collect all trained units' parameters and optimizer state; `keep(unit, frame)` stores each as it arrives."""
        await self.tell(SaveState(step=step))
        missing = {member.worker for member in self.stages}
        while missing:
            event = await self._take_event()
            if event is None:
                continue
            if event.frame.header.kind == STATE:
                self._keep_state(event, keep)
            elif isinstance(event.message, StateSent):
                missing.discard(event.member.worker)
            else:
                self._refuse(event, _unexpected(event, "state"))

    def _keep_state(self, event: Event, keep: Callable[[int, Frame], None]) -> None:
        try:
            keep(unit_of(event), event.frame)
        except ProtocolError as error:
            self._refuse(event, error)

    async def forward(self, feeder: Feeder, steps: int, on_predictions: Callable[[int, Frame], None]) -> float:
        """Run the pipeline forward only over `steps` steps of one micro-batch each, as for evaluation.

        `on_predictions(step, frame)` gets each micro-batch's predictions, in order.

        Returns:
            The loss, summed over all loss tokens; 0 without labels.
        """
        base = self._next_forward_step
        self._next_forward_step += steps
        self._forward_base, self._forward_done, self._forward_losses = base, set(), {}
        message = RunSegment(schedule="forward", first_step=base, steps=steps, micro_batches=1)
        await self.tell(message)
        # One micro-batch in each stage and one on the way to it: no stage runs dry, and no inbox grows.
        window = 2 * len(self.stages)
        fed, predicted = 0, set()
        while len(self._forward_done) < steps:
            if self.stop_requested:
                raise InterruptedRunError(
                    "the run was stopped during an evaluation; the checkpoint before it was kept",
                    hint="continue with --resume",
                )
            while fed < steps and fed - len(self._forward_done) < window:
                await self._feed(feeder, fed, base + fed)
                fed += 1
            event = await self._take_event()
            if event is None:
                continue
            if event.frame.header.kind != PREDICTIONS:
                self._refuse(event, _unexpected(event, "predictions"))
                continue
            wire_step = event.frame.header.step
            if wire_step >= base and wire_step not in predicted:  # else it says it twice
                predicted.add(wire_step)
                self._take_predictions(event, wire_step - base, on_predictions)
        return sum(self._forward_losses[step] for step in sorted(self._forward_losses))

    def _take_predictions(self, event: Event, step: int, on_predictions: Callable[[int, Frame], None]) -> None:
        try:
            on_predictions(step, event.frame)
        except ProtocolError as error:
            self._refuse(event, error)


def _unexpected(event: Event, due: str) -> ProtocolError:
    what = type(event.message).__name__ if event.message is not None else event.frame.header.kind[:40]
    return ProtocolError(f"{event.member.hello.name} sent {what} where {due} should come")
