"""The door and the round table: who is let in, what is passed on, and who counts as lost. Over loopback links."""

import asyncio
import contextlib

import pytest

from coterie.cluster.messages import (
    CONTROL,
    Failed,
    Goodbye,
    Heartbeat,
    Refused,
    RunSegment,
    control,
    unpack,
)
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.errors import JoinRefusedError, OutOfMemoryError, StorageError, WorkerLostError
from coterie.transport.frame import Frame, FrameHeader
from coterie.units import MIB

# ---- who is let in


def test_two_workers_of_one_name_are_told_apart(at_table):
    async def test(table):
        _, first = await table.join("board")
        _, second = await table.join("board")
        assert (first, second) == ("board", "board-2")
        assert [member.worker for member in await table.members.wait_for(2, 1.0)] == [first, second]

    at_table(test)


def test_nobody_can_call_themselves_the_coordinator(at_table):
    async def test(table):
        _, worker = await table.join("coordinator")
        assert worker == "coordinator-2"

    at_table(test)


@pytest.mark.parametrize(
    ("first_frame", "slug"),
    [
        (lambda table: table.hello("not-a-token-of-this-run"), "join-refused"),
        (lambda table: table.hello(table.token, wire_version=WIRE_VERSION + 1), "version-mismatch"),
        (lambda _table: control(Heartbeat()), "protocol"),
        (lambda _table: Frame(FrameHeader(kind=CONTROL, body=b"\x80\x04\x95 a pickle")), "protocol"),
        (lambda _table: Frame(FrameHeader(kind="hidden")), "protocol"),
    ],
    ids=["wrong token", "other version", "no hello", "pickle", "data before hello"],
)
def test_a_wrong_beginning_is_refused_with_its_reason_and_the_others_stay(at_table, first_frame, slug):
    async def test(table):
        link, worker = await table.join()
        answer = await table.answer(first_frame(table))
        assert isinstance(answer, Refused)
        assert answer.slug == slug
        await link.send(control(RunSegment(schedule="flush", first_step=0, steps=1, micro_batches=1)))
        assert (await table.members.next_event()).member.worker == worker
        assert len(table.members.by_id) == 1

    at_table(test)


def test_both_versions_are_named_to_a_worker_of_another_one(at_table):
    async def test(table):
        answer = await table.answer(table.hello(table.token, wire_version=77, package_version="9.9"))
        assert "version 77 (coterie 9.9)" in answer.message
        assert f"speaks {WIRE_VERSION} " in answer.message

    at_table(test)


def test_one_worker_more_than_awaited_is_refused(at_table):
    async def test(table):
        await table.join()
        answer = await table.answer(table.hello(table.token))
        assert answer.slug == "join-refused"
        assert "used up" in answer.message

    at_table(test, seats=1)


def test_a_worker_that_leaves_before_the_run_begins_frees_its_place(at_table):
    async def test(table):
        left = []
        table.members.on_left = lambda member, error: left.append((member.worker, error.slug))
        gone, _ = await table.join("first")
        await gone.close()
        await table.until(lambda: left)
        assert left == [("first", "worker-lost")]
        await table.join("second")
        assert [member.worker for member in await table.members.wait_for(1, 1.0)] == ["second"]

    at_table(test, seats=1)


def test_a_peer_that_hangs_up_before_its_welcome_takes_no_place(at_table):
    async def test(table):
        link = await table.knock(table.hello(table.token))
        link.abort()
        await table.until(lambda: not table.members.by_id and not table.server._links)
        await table.join()

    at_table(test, seats=1)


def test_waiting_in_vain_says_how_many_came(at_table):
    async def test(table):
        await table.join()
        waiting = asyncio.ensure_future(table.members.wait_for(2, 60.0))
        await asyncio.sleep(0)
        table.clock.advance(61)
        with pytest.raises(JoinRefusedError, match="1 of 2 workers joined within 60 s"):
            await waiting

    at_table(test)


def test_each_worker_is_told_of_as_it_comes_in_and_after_the_beginning_as_one_that_joins_a_run(at_table):
    async def test(table):
        met, joined = [], []
        table.members.on_met, table.members.on_joined = met.append, joined.append
        await table.join("a")
        await table.until(lambda: [member.hello.name for member in met] == ["a"])
        await table.members.wait_for(1, 1.0)
        await table.join("b")
        await table.until(lambda: [member.hello.name for member in joined] == ["b"])
        assert len(met) == 1

    at_table(test, seats=2)


def test_what_fails_outside_ends_the_waiting(at_table):
    async def test(table):
        table.members.post(StorageError("no room"))
        with pytest.raises(StorageError):
            await table.members.wait_for(2, 60.0)

    at_table(test)


# ---- who is lost


def test_a_broken_link_is_a_lost_worker_with_its_name(at_table):
    async def test(table):
        link, _ = await table.join("old-laptop")
        await table.members.wait_for(1, 1.0)
        link.abort()
        with pytest.raises(WorkerLostError, match="old-laptop is gone") as caught:
            await table.members.next_event()
        assert "start the worker again" in caught.value.hint

    at_table(test)


def test_who_knows_more_about_a_lost_worker_is_heard(at_table):
    async def test(table):
        link, _ = await table.join("old-laptop")
        await table.members.wait_for(1, 1.0)
        link.abort()
        asyncio.get_running_loop().call_later(0.1, table.members.post, WorkerLostError("killed by signal 9"))
        with pytest.raises(WorkerLostError, match="signal 9"):
            await table.members.next_event()

    at_table(test)


def test_a_worker_that_says_goodbye_in_mid_run_is_lost_once(at_table):
    async def test(table):
        link, _ = await table.join("board")
        await table.members.wait_for(1, 1.0)
        await link.send(control(Goodbye(reason="stopped by its owner")))
        await link.close()
        with pytest.raises(WorkerLostError, match="board left: stopped by its owner"):
            await table.members.next_event()
        await table.until(lambda: not table.server._links)
        assert table.members._events.empty()

    at_table(test)


def test_an_error_of_a_worker_keeps_its_kind_and_names_the_worker(at_table):
    async def test(table):
        link, _ = await table.join("board")
        await table.members.wait_for(1, 1.0)
        await link.send(control(Failed(slug="out-of-memory", message="memory ran out", hint="buy more")))
        with pytest.raises(OutOfMemoryError, match="board: memory ran out") as caught:
            await table.members.next_event()
        assert caught.value.hint == "buy more"

    at_table(test)


def test_silence_beyond_the_limit_is_a_lost_worker(at_table):
    async def test(table):
        await table.join("board")
        link, _ = await table.join("laptop")
        await table.members.wait_for(2, 1.0)
        table.clock.advance(table.silence_s - 1)
        await link.send(control(Heartbeat(rss_bytes=5)))
        await table.until(lambda: any(member.rss_bytes for member in table.members.by_id.values()))
        table.clock.advance(2)
        table.members.check_silence()
        with pytest.raises(WorkerLostError, match=r"board has been silent for 31 s \(limit 30 s\)"):
            await table.members.next_event()
        assert table.members._events.empty()

    at_table(test)


def test_a_large_frame_on_a_slow_link_is_no_silence(at_table):
    async def test(table):
        link, worker = await table.join()
        await table.members.wait_for(1, 1.0)
        member = table.members.by_id[worker]
        link._transport.write(b"COTR")  # the beginning of a frame; the rest takes its time
        before = member.link.bytes_received
        await table.until(lambda: member.link.bytes_received > before)
        table.clock.advance(table.silence_s + 1)
        table.members.check_silence()
        assert table.members._events.empty()
        table.clock.advance(table.silence_s + 1)
        table.members.check_silence()
        with pytest.raises(WorkerLostError, match="silent"):
            await table.members.next_event()

    at_table(test)


def test_whoever_waits_to_send_to_a_silent_worker_is_woken(at_table):
    async def test(table):
        link, worker = await table.join("board")
        await table.members.wait_for(1, 1.0)
        link._transport.pause_reading()
        sending = asyncio.ensure_future(
            table.members.by_id[worker].send_frame(table.tensor_frame("", worker, 64 * MIB))
        )
        await asyncio.sleep(0.05)
        assert not sending.done()
        table.clock.advance(table.silence_s + 1)
        table.members.check_silence()
        with pytest.raises(WorkerLostError, match="board"):
            await sending

    at_table(test)


def test_a_worker_that_takes_nothing_does_not_hold_up_the_heartbeats_of_others(at_table):
    async def test(table):
        stuck, stuck_id = await table.join("stuck")
        other, _ = await table.join("other")
        await table.members.wait_for(2, 1.0)
        stuck._transport.pause_reading()
        flood = asyncio.ensure_future(
            table.members.by_id[stuck_id].send_frame(table.tensor_frame("", stuck_id, 64 * MIB))
        )
        beat = asyncio.ensure_future(table.members.beat())
        for _ in range(3):
            assert isinstance(unpack((await other.receive()).header.body), Heartbeat)
        for task in (beat, flood):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        stuck.abort()

    at_table(test)


def test_an_error_while_a_heartbeat_is_recorded_is_not_the_workers_fault(at_table):
    async def test(table):
        def disk_is_full(_member):
            raise StorageError("no space left")

        link, _ = await table.join()
        await table.members.wait_for(1, 1.0)
        table.members.on_heartbeat = disk_is_full
        await link.send(control(Heartbeat()))
        with pytest.raises(StorageError, match="no space left"):
            await table.members.next_event()

    at_table(test)
