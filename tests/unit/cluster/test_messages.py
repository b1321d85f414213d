"""Control messages: strict in, exact out."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.cluster import fault_messages, messages, shard_messages, side_messages
from coterie.cluster.messages import AnyMessage, Heartbeat, NormPart, StepDone, Stop, control, pack, unpack
from coterie.errors import ProtocolError
from coterie.ids import WorkerId


def test_a_message_survives_the_wire():
    message = NormPart(step=7, squares=((0, 0.25), (3, 1e-300)))
    assert unpack(pack(message)) == message


def test_every_message_class_is_part_of_the_union():
    classes = {
        value
        for module in (messages, side_messages, fault_messages, shard_messages)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, messages.Message) and value is not messages.Message
    }
    assert classes == set(AnyMessage.__args__)


def test_a_control_frame_says_who_speaks_to_whom():
    frame = control(Stop(reason="done"), target=WorkerId("phone"))
    assert (frame.header.kind, frame.header.source, frame.header.target) == ("control", "coordinator", "phone")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"type": "StepDone", "step": "three"}),
        msgspec.msgpack.encode({"type": "NormPart", "step": 1}),
        b"cos\nsystem\n(S'true'\ntR.",
    ],
    ids=["empty", "no tag", "unknown tag", "wrong type", "missing field", "a pickle"],
)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(ProtocolError, match="does not decode"):
        unpack(body)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(body):
    try:
        unpack(body)
    except ProtocolError:
        return


@given(st.binary(max_size=60))
def test_a_damaged_message_is_a_message_or_a_protocol_error(noise):
    body = bytearray(pack(Heartbeat(rss_bytes=5)))
    body[-len(noise) :] = noise
    try:
        unpack(bytes(body))
    except ProtocolError:
        return


def test_reports_carry_the_fields_of_the_pipeline_s_own():
    from coterie.pipeline.reports import StepReport  # noqa: PLC0415 - imports torch, which the rest here does not need

    assert set(StepReport.__struct_fields__) <= set(StepDone.__struct_fields__)
