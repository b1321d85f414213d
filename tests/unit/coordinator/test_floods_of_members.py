"""A member that says more than anybody can use: memory and disk of the coordinator do not follow it."""

import pytest

from coterie.cluster.messages import Heartbeat, NormPart, control
from coterie.coordinator import inbox
from coterie.errors import WorkerLostError


def test_heartbeats_that_come_too_often_are_heard_and_not_written_down(at_table):
    async def test(table):
        noted = []
        table.members.on_heartbeat = lambda member: noted.append(member.rss_bytes)
        link, worker = await table.join()
        await table.members.wait_for(1, 1.0)
        for number in range(1, 101):
            await link.send(control(Heartbeat(rss_bytes=number)))
        await table.until(lambda: table.members.by_id[worker].rss_bytes == 100)
        assert noted == [1]
        table.clock.advance(1.0)
        await link.send(control(Heartbeat(rss_bytes=101)))
        await table.until(lambda: table.members.by_id[worker].rss_bytes == 101)
        assert noted == [1, 101]

    at_table(test)


def test_a_worker_whose_messages_pile_up_is_lost(at_table, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_UNREAD", 20)

    async def test(table):
        link, worker = await table.join()
        await table.members.wait_for(1, 1.0)
        member = table.members.by_id[worker]
        for step in range(20):
            await link.send(control(NormPart(step=step, squares=())))
            await table.until(lambda: member.unread == 1)
            assert (await table.members.next_event()).message.step == step
        for step in range(25):
            await link.send(control(NormPart(step=step, squares=())))
        await table.until(lambda: member.is_gone)
        for _ in range(20):
            await table.members.next_event()
        with pytest.raises(WorkerLostError, match="20 messages that nobody has read"):
            await table.members.next_event()

    at_table(test)
