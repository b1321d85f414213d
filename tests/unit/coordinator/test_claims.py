"""A worker is heard on its own stage and on steps that it was given, and on nothing else."""

import math

import msgspec
import pytest

from coterie.cluster.fault_messages import REPLICA
from coterie.cluster.messages import (
    CONTROL,
    PREDICTIONS,
    STATE,
    Hello,
    LinksMeasured,
    MicroBatchDone,
    NormPart,
    StepDone,
    UnitBody,
    pack,
)
from coterie.coordinator.claims import check_claim
from coterie.coordinator.member import Event, Member
from coterie.errors import ProtocolError
from coterie.ids import WorkerId
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.transport.frame import Frame, FrameHeader
from coterie.transport.stream_link import StreamLink

FED = 5
FORWARD = range(1 << 40, (1 << 40) + 3)


def filled(kind, **known):
    """A struct whose other fields hold nothing in particular."""
    empty = {"int": 0, "float": 0.0, "bool": False, "str": "", "tuple": ()}
    fields = {}
    for field in msgspec.structs.fields(kind):
        name = getattr(field.type, "__name__", "str")
        fields[field.name] = known.get(field.name, empty.get(name, ""))
    return kind(**fields)


def stage(number, worker, first, stop):
    return filled(
        StageAssignment,
        stage=number,
        worker=WorkerId(worker),
        first_unit=first,
        stop_unit=stop,
        memory=filled(MemoryEstimate),
    )


PLAN = filled(Plan, micro_batches=4, units=6, stages=(stage(0, "first", 0, 3), stage(1, "last", 3, 6)))


def member(worker):
    return Member(WorkerId(worker), filled(Hello, name=worker), StreamLink())


def check(worker, message=None, header=None):
    header = header or FrameHeader(kind=CONTROL)
    check_claim(Event(member(worker), message, Frame(header)), PLAN, fed=FED, forward=FORWARD)


def loss(step=4, micro_batch=3):
    return MicroBatchDone(step=step, micro_batch=micro_batch, loss_sum=1.0, loss_tokens=1)


def done(**changes):
    plain = {"step": 4, "forward_s": 0.5, "learning_rate": 1e-3, "backend_busy_s": {"opencl": 0.25}}
    return filled(StepDone, **plain | changes)


def state(kind, unit, step=FED):
    return FrameHeader(kind=kind, step=step, body=pack(UnitBody(unit=unit)))


@pytest.mark.parametrize(
    ("worker", "message", "header"),
    [
        ("last", loss(), None),
        ("last", loss(step=0), None),
        ("last", loss(step=FORWARD[-1], micro_batch=0), None),
        ("first", done(), None),
        ("first", done(step=FORWARD[0]), None),
        ("last", done(grad_norm=math.nan), None),
        ("first", NormPart(step=4, squares=((0, 1.0), (2, 1.0))), None),
        ("last", None, state(REPLICA, 3)),
        ("first", None, state(STATE, 0)),
        ("last", None, FrameHeader(kind=PREDICTIONS, step=FORWARD[0])),
        ("first", LinksMeasured(links=()), None),
        ("a spare", loss(step=99), None),
    ],
)
def test_what_a_stage_knows_of_itself_passes(worker, message, header):
    check(worker, message, header)


@pytest.mark.parametrize(
    ("worker", "message", "header", "reason"),
    [
        ("first", loss(), None, "only the last stage"),
        ("last", loss(step=FED), None, "step 5, which nobody has asked for"),
        ("last", loss(step=-1), None, "step -1"),
        ("last", loss(step=FORWARD.stop), None, "nobody has asked for"),
        ("last", loss(micro_batch=4), None, "micro-batch 4 of 4"),
        ("last", loss(micro_batch=-1), None, "micro-batch -1 of 4"),
        ("first", done(step=10**12), None, "nobody has asked for"),
        ("first", done(forward_s=math.nan), None, "seconds of work"),
        ("first", done(cpu_s=math.inf), None, "seconds of work"),
        ("first", done(wait_s=-1.0), None, "seconds of work"),
        ("first", done(backend_busy_s={"opencl": math.nan}), None, "seconds of work"),
        ("first", done(learning_rate=math.nan), None, "a learning rate of nan"),
        ("first", done(update_s=1e300), None, "seconds of work"),
        ("first", NormPart(step=FED, squares=()), None, "nobody has asked for"),
        ("first", NormPart(step=FORWARD[0], squares=()), None, "nobody has asked for"),
        ("first", NormPart(step=4, squares=((3, 0.0),)), None, "unit 3; its stage holds 0 to 2"),
        ("last", None, state(REPLICA, 2), "unit 2; its stage holds 3 to 5"),
        ("first", None, state(STATE, -1), "unit -1"),
        ("last", None, state(REPLICA, 3, step=FED + 1), "after 6 steps; 5 have been given out"),
        ("last", None, FrameHeader(kind=REPLICA, body=pack(loss())), "without saying of which unit"),
        ("last", None, FrameHeader(kind=STATE, body=b"\x80\x04."), "does not decode"),
        ("first", None, FrameHeader(kind=PREDICTIONS, step=FORWARD[0]), "only the last stage"),
        ("last", None, FrameHeader(kind=PREDICTIONS, step=3), "nobody has asked for"),
    ],
)
def test_what_it_cannot_know_is_refused_by_name(worker, message, header, reason):
    with pytest.raises(ProtocolError, match=reason):
        check(worker, message, header)
