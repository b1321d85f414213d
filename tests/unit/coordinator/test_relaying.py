"""What the coordinator passes on between workers without a direct link, and how everybody hears the end."""

import pytest

from coterie.cluster.messages import (
    HIDDEN,
    RunSegment,
    Stop,
    control,
    unpack,
)
from coterie.errors import WorkerLostError
from coterie.ids import WorkerId
from coterie.units import MIB


def test_tensors_between_workers_without_a_direct_link_are_passed_on(at_table):
    async def test(table):
        left, left_id = await table.join("left")
        right, right_id = await table.join("right")
        await table.members.wait_for(2, 1.0)
        await left.send(table.tensor_frame(left_id, right_id))
        frame = await right.receive()
        assert (frame.header.kind, frame.header.step, frame.header.source) == (HIDDEN, 7, left_id)
        assert bytes(frame.buffers[0]) == bytes(16)

    at_table(test)


@pytest.mark.parametrize(
    "frame",
    [
        lambda table: table.tensor_frame("right", "right"),
        lambda table: table.tensor_frame("left", "nobody"),
        lambda _table: control(Stop(), source=WorkerId("left"), target=WorkerId("right")),
    ],
    ids=["forged source", "unknown target", "the coordinator's words"],
)
def test_what_no_correct_worker_sends_is_not_passed_on(at_table, frame):
    async def test(table):
        left, _ = await table.join("left")
        right, _ = await table.join("right")
        await table.members.wait_for(2, 1.0)
        await left.send(frame(table))
        with pytest.raises(WorkerLostError, match="left is gone"):
            await table.members.next_event()
        assert not right._inbox

    at_table(test)


def test_a_worker_that_can_no_longer_be_reached_is_named_not_the_one_that_sent_to_it(at_table):
    async def test(table):
        left, left_id = await table.join("left")
        right, right_id = await table.join("right")
        await table.members.wait_for(2, 1.0)
        right._transport.pause_reading()
        await left.send(table.tensor_frame(left_id, right_id, 32 * MIB))
        await table.until(lambda: table.members.by_id[left_id].is_relaying)
        right.abort()
        with pytest.raises(WorkerLostError, match="right"):
            await table.members.next_event()

    at_table(test)


def test_everybody_hears_the_end_at_once_and_nobody_is_lost_by_it(at_table):
    async def test(table):
        links = [(await table.join(name))[0] for name in ("left", "right")]
        await table.members.wait_for(2, 1.0)
        await table.members.dismiss(Stop(reason="finished"))
        for link in links:
            message = unpack((await link.receive()).header.body)
            assert isinstance(message, Stop)
            assert message.reason == "finished"
            await link.close()
        await table.until(lambda: not table.server._links)
        assert table.members._events.empty()

    at_table(test)


def test_what_workers_say_arrives_in_order_with_who_said_it(at_table):
    async def test(table):
        link, worker = await table.join()
        await table.members.wait_for(1, 1.0)
        for step in range(3):
            await link.send(control(RunSegment(schedule="flush", first_step=step, steps=1, micro_batches=1)))
        for step in range(3):
            event = await table.members.next_event()
            assert event.member.worker == worker
            assert event.message.first_step == step

    at_table(test)
