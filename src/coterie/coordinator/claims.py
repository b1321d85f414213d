"""What a worker may say of itself in a run: only of its own stage, and of steps that it has been given.

The token lets a device in; it does not make it honest, nor free of errors. A worker that claims what it cannot know is
treated as lost, and the run goes on without it. What it computes is another matter: nobody checks gradients.
"""

import math

from coterie.cluster.fault_messages import REPLICA
from coterie.cluster.messages import PREDICTIONS, STATE, MicroBatchDone, NormPart, StepDone, UnitBody, unpack
from coterie.coordinator.member import Event
from coterie.errors import ProtocolError
from coterie.planner.plan import Plan, StageAssignment

MOST_SECONDS = 1e7
"""Of work in one step: a third of a year."""


def check_claim(event: Event, plan: Plan, *, fed: int, forward: range) -> None:
    """Check what a worker with a stage says.

    Args:
        event: What was said; anything that is no report of work done passes.
        plan: The plan in effect.
        fed: Optimizer steps whose micro-batches have been sent to the workers.
        forward: The numbers of forward steps that are under way or over in this forward run.

    Raises:
        ProtocolError: It cannot be so.
    """
    place = next((stage for stage in plan.stages if stage.worker == event.member.worker), None)
    if place is None:
        return
    who, message, header = event.member.hello.name, event.message, event.frame.header
    match message:
        case MicroBatchDone():
            _check_last(who, "a loss", place, plan)
            _check_step(who, message.step, fed, forward)
            if not 0 <= message.micro_batch < plan.micro_batches:
                raise ProtocolError(f"{who} reported micro-batch {message.micro_batch} of {plan.micro_batches}")
        case StepDone():
            _check_step(who, message.step, fed, forward)
            _check_seconds(who, message)
        case NormPart():
            _check_step(who, message.step, fed, range(0))
            for unit, _ in message.squares:
                _check_unit(who, unit, place)
        case None if header.kind in (REPLICA, STATE):
            _check_unit(who, unit_of(event), place)
            if header.step > fed:
                raise ProtocolError(f"{who} sent the state after {header.step} steps; {fed} have been given out")
        case None if header.kind == PREDICTIONS:
            _check_last(who, "predictions", place, plan)
            _check_step(who, header.step, 0, forward)
        case _:
            pass


def unit_of(event: Event) -> int:
    """Which unit a frame of trained tensors holds.

    Raises:
        ProtocolError: It does not say so.
    """
    body = unpack(event.frame.header.body)
    if not isinstance(body, UnitBody):
        raise ProtocolError(f"{event.member.hello.name} sent state without saying of which unit")
    return body.unit


def _check_last(who: str, what: str, place: StageAssignment, plan: Plan) -> None:
    if place.stage != len(plan.stages) - 1:
        raise ProtocolError(f"{who} sent {what}, which only the last stage knows; it has stage {place.stage}")


def _check_step(who: str, step: int, fed: int, forward: range) -> None:
    if not (0 <= step < fed or step in forward):
        raise ProtocolError(f"{who} reported step {step}, which nobody has asked for")


def _check_unit(who: str, unit: int, place: StageAssignment) -> None:
    if not place.first_unit <= unit < place.stop_unit:
        raise ProtocolError(
            f"{who} sent state of unit {unit}; its stage holds {place.first_unit} to {place.stop_unit - 1}"
        )


def _check_seconds(who: str, message: StepDone) -> None:
    """Figures of time feed plans and records: they must be some time."""
    figures = (
        *(message.forward_s, message.backward_s, message.update_s, message.wait_s, message.cpu_s),
        *message.backend_busy_s.values(),
    )
    if not all(math.isfinite(seconds) and 0 <= seconds <= MOST_SECONDS for seconds in figures):
        raise ProtocolError(f"{who} reported {figures} seconds of work")
    if not math.isfinite(message.learning_rate):  # JSON has no such number: the run's events could not be read again
        raise ProtocolError(f"{who} reported a learning rate of {message.learning_rate}")
