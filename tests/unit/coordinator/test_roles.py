"""Seats for devices and for a server, and workers that are let go while a run goes on."""

import asyncio

import pytest

from coterie.cluster.messages import Heartbeat, Refused, Stop, control, unpack
from coterie.errors import JoinRefusedError


def test_a_server_is_let_in_once_and_takes_no_devices_seat(at_table):
    async def test(table):
        table.members._seats = {"device": 1, "server": 1}
        refused = await table.answer(table.hello(table.token, "a", role="server"))
        assert not isinstance(refused, Refused)
        answer = await table.answer(table.hello(table.token, "b", role="server"))
        assert isinstance(answer, Refused)
        assert "room for 1 server" in answer.message
        _, worker = await table.join("phone")
        assert [member.worker for member in table.members.with_role("device")] == [worker]

    at_table(test)


def test_a_run_that_waits_for_its_server_in_vain_says_so(at_table):
    async def in_vain(table, count):
        waiting = asyncio.ensure_future(table.members.wait_for(count, 60.0))
        await asyncio.sleep(0)
        table.clock.advance(61)
        with pytest.raises(JoinRefusedError) as late:
            await waiting
        return late.value

    async def test(table):
        table.members._seats = {"device": 1, "server": 1}
        await table.join("phone")
        late = await in_vain(table, 2)
        assert late.message == "1 of 2 workers joined within 60 s; the server is not among them"
        assert "--role server" in late.hint
        assert not isinstance(await table.answer(table.hello(table.token, "desk", role="server")), Refused)
        late = await in_vain(table, 3)
        assert late.message == "2 of 3 workers joined within 60 s"
        assert "--role server" not in late.hint

    at_table(test)


def test_a_run_without_side_tuning_has_no_seat_for_a_server(at_table):
    async def test(table):
        table.members._seats = {"device": 2, "server": 0}
        answer = await table.answer(table.hello(table.token, "desk", role="server"))
        assert isinstance(answer, Refused)
        assert "room for 0 servers" in answer.message
        assert "--role server" in answer.hint
        await table.join("phone")  # the refused one has used up no place
        await table.join("watch")

    at_table(test)


def test_a_released_worker_hears_why_and_is_missed_by_nobody(at_table):
    async def test(table):
        phone, worker = await table.join("phone")
        desk, _ = await table.join("desk")
        await table.members.wait_for(2, 1.0)
        await table.members.release(table.members.by_id[worker], Stop(reason="everything is collected", goes_on=True))
        assert unpack((await phone.receive()).header.body) == Stop(reason="everything is collected", goes_on=True)
        await phone.close()
        await desk.send(control(Heartbeat(rss_bytes=7)))
        await table.until(lambda: table.members.with_role("device")[0].rss_bytes == 7)
        assert [member.hello.name for member in table.members.by_id.values()] == ["desk"]
        assert table.members._events.empty()

    at_table(test)
