"""A run that goes on when workers are lost: whose loss is told how, and what is no longer heard. Real links."""

import pytest

from coterie.cluster.fault_messages import Leaving
from coterie.cluster.messages import CONTROL, Failed, Goodbye, Refused, RunSegment, StageReady, control
from coterie.coordinator.gathering import measure_newcomer
from coterie.coordinator.members import MOST_MISDEEDS
from coterie.errors import OutOfMemoryError, ProtocolError, WorkerLostError
from coterie.ids import WorkerId
from coterie.transport.frame import Frame, FrameHeader


async def two(table, *, needed=("left",)):
    """Two workers of a run that has begun and can do without some."""
    left, _ = await table.join("left")
    right, _ = await table.join("right")
    await table.members.wait_for(2, 1.0)
    table.members.go_on_without([WorkerId(worker) for worker in needed], 2)
    return left, right


def test_the_loss_of_a_stage_is_raised_at_once_before_what_was_said_earlier(at_table):
    async def test(table):
        left, _ = await two(table)
        await left.send(control(StageReady(stage=0, link_to_next=""), plan_version=2))
        left.abort()
        await table.until(lambda: table.members.losses)
        with pytest.raises(WorkerLostError, match="left is gone"):
            await table.members.next_event()
        (loss,) = table.members.take_losses()
        assert (loss.member.worker, loss.stays) == ("left", False)
        assert list(table.members.by_id) == ["right"]
        table.members.wake()
        assert await table.members.next_event_or_wake() is None, "nothing is left of what it said"

    at_table(test)


def test_what_others_said_just_before_a_loss_is_heard_after_it(at_table):
    async def test(table):
        left, right = await two(table, needed=("left", "right"))
        await right.send(control(StageReady(stage=1, link_to_next=""), plan_version=2))
        await table.until(lambda: not table.members._events.empty())
        left.abort()
        await table.until(lambda: table.members.losses)
        with pytest.raises(WorkerLostError, match="left is gone"):
            await table.members.next_event()
        table.members.take_losses()
        table.members.wake()
        event = await table.members.next_event_or_wake()
        assert event is not None
        assert event.member.worker == "right"

    at_table(test)


def test_the_loss_of_a_worker_without_a_stage_is_only_told(at_table):
    async def test(table):
        left, right = await two(table)
        gone = []
        table.members.on_left = lambda member, error: gone.append((member.worker, error.message))
        await right.send(control(Goodbye(reason="its owner needs it")))
        await table.until(lambda: gone)
        assert gone == [("right", "right left: its owner needs it")]
        await left.send(control(StageReady(stage=0, link_to_next=""), plan_version=2))
        assert (await table.members.next_event()).member.worker == "left"
        assert not table.members.losses

    at_table(test)


def test_one_that_is_back_before_the_next_plan_is_a_spare_under_its_old_name(at_table):
    async def test(table):
        left, _ = await two(table)
        left.abort()
        await table.until(lambda: table.members.losses)
        back, worker = await table.join("left")
        assert worker == "left"
        await back.send(control(StageReady(stage=0, link_to_next="")))
        await table.until(table.members.by_id[worker].aside.qsize)

    at_table(test, seats=3)


def test_a_stage_that_fails_alone_leaves_its_worker_in(at_table):
    async def test(table):
        left, _ = await two(table)
        await left.send(control(Failed(slug="out-of-memory", message="memory ran out"), plan_version=2))
        with pytest.raises(OutOfMemoryError):
            await table.members.next_event()
        (loss,) = table.members.take_losses()
        assert loss.stays
        assert "left" in table.members.by_id
        await left.send(control(StageReady(stage=0, link_to_next=""), plan_version=2))
        assert isinstance((await table.members.next_event()).message, StageReady)

    at_table(test)


def test_a_worker_that_ends_with_an_error_is_lost(at_table):
    async def test(table):
        left, _ = await two(table)
        await left.send(control(Failed(slug="out-of-memory", message="memory ran out")))
        await table.until(lambda: table.members.losses)
        assert not table.members.losses[0].stays
        assert "left" not in table.members.by_id

    at_table(test)


def test_words_of_an_older_plan_are_not_heard_and_those_of_none_always(at_table):
    async def test(table):
        left, _ = await two(table)
        await left.send(control(StageReady(stage=7, link_to_next=""), plan_version=1))
        await left.send(control(Failed(slug="network", message="a peer is gone"), plan_version=1))
        await left.send(control(StageReady(stage=1, link_to_next=""), plan_version=2))
        await left.send(control(RunSegment(schedule="flush", first_step=3, steps=1, micro_batches=1)))
        assert (await table.members.next_event()).message.stage == 1
        assert (await table.members.next_event()).message.first_step == 3

    at_table(test)


def test_what_was_said_before_the_next_plan_but_not_heard_yet_is_dropped_too(at_table):
    async def test(table):
        left, _ = await two(table)
        await left.send(control(StageReady(stage=0, link_to_next=""), plan_version=2))
        await table.until(lambda: not table.members._events.empty())
        table.members.go_on_without(["left"], 3)
        await left.send(control(StageReady(stage=1, link_to_next=""), plan_version=3))
        assert (await table.members.next_event()).message.stage == 1

    at_table(test)


def test_a_spare_answers_aside_and_wishes_are_told_of_any_worker(at_table):
    async def test(table):
        left, right = await two(table)
        wishes = []
        table.members.on_wish = lambda member, wish: wishes.append((member.worker, wish.reason))
        await right.send(control(StageReady(stage=0, link_to_next="")))
        await right.send(control(Leaving(reason="battery")))
        await left.send(control(Leaving(reason="its owner needs it")))
        await table.until(lambda: len(wishes) == 2)
        assert sorted(wishes) == [("left", "its owner needs it"), ("right", "battery")]
        assert table.members._events.empty()
        assert table.members.by_id["right"].aside.qsize() == 1

    at_table(test)


def test_what_is_sent_to_a_lost_worker_through_the_coordinator_is_dropped_and_the_sender_stays(at_table):
    async def test(table):
        left, right = await two(table, needed=("left", "right"))
        left.abort()
        await table.until(lambda: table.members.losses)
        table.members.take_losses()
        await right.send(table.tensor_frame("right", "left"))
        await right.send(control(StageReady(stage=1, link_to_next=""), plan_version=2))
        assert (await table.members.next_event()).member.worker == "right"

    at_table(test)


def test_a_lost_worker_comes_back_under_its_name_through_the_open_door(at_table):
    async def test(table):
        left, _ = await two(table)
        joined = []
        table.members.on_joined = lambda member: joined.append(member.worker)
        left.abort()
        await table.until(lambda: table.members.losses)
        token = table.door.issue()
        link = await table.knock(table.hello(token, "left"))
        await table.until(lambda: joined)
        assert joined == ["left"]
        assert not link.is_closed
        assert sorted(table.members.by_id) == ["left", "right"]

    at_table(test)


def test_whoever_says_what_cannot_be_is_expelled_where_the_run_can_do_without(at_table):
    async def test(table):
        await table.join("left")
        (left,) = await table.members.wait_for(1, 1.0)
        assert not table.members.expel(left, ProtocolError("nonsense"))
        table.members.go_on_without(["left"], 1)
        assert table.members.expel(left, ProtocolError("nonsense"))
        with pytest.raises(ProtocolError, match="nonsense"):
            await table.members.next_event()

    at_table(test)


def test_a_worker_lost_before_the_run_could_do_without_it_is_not_forgotten(at_table):
    async def test(table):
        left, _ = await table.join("left")
        await table.members.wait_for(1, 1.0)
        left.abort()
        await table.until(lambda: table.members.losses)
        table.members.go_on_without(["left"], 1)
        with pytest.raises(WorkerLostError, match="left"):
            await table.members.next_event()
        assert len(table.members.take_losses()) == 1
        assert not table.members.by_id

    at_table(test)


def test_a_newcomer_that_goes_while_it_is_measured_is_not_waited_for(at_table):
    async def test(table):
        _, right = await two(table)
        newcomer = table.members.by_id[WorkerId("right")]
        newcomer.send = lambda _message: right.send(control(Goodbye(reason="its owner needs it")))
        with pytest.raises(WorkerLostError, match="right has gone while it was measured"):
            await measure_newcomer(table.members, newcomer, object(), "token")

    at_table(test)


def test_who_breaks_the_rules_three_times_is_let_in_no_more_and_others_are(at_table):
    async def test(table):
        await two(table)
        pickle = Frame(FrameHeader(kind=CONTROL, body=b"\x80\x04N."))
        for number in range(MOST_MISDEEDS):
            link, worker = await table.join("rascal")
            await link.send(pickle)
            await table.until(lambda name=worker: name not in table.members.by_id)
            assert "left" in table.members.by_id, number
        answer = await table.answer(table.hello(table.token, "rascal"))
        assert isinstance(answer, Refused)
        assert answer.slug == "join-refused"
        assert "rascal broke the rules of this run 3 times" in answer.message
        await table.join("honest")

    at_table(test, seats=4 + MOST_MISDEEDS)
