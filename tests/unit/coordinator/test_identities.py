"""Devices that come back, and copies of their identities, at a coordinator's door over loopback links."""

import pytest

from coterie.cluster.messages import Heartbeat, Refused, Welcome, control, unpack
from coterie.errors import WorkerLostError
from coterie.transport.identity import open_identity
from coterie.transport.user_settings import IN_MEMORY


def known_hello(table, device, ticket="", name="board"):
    proof = device.prove(coordinator=table.door.fingerprint, token=table.token, ticket=ticket, nonce="")
    return table.hello(table.token, name, identity=device.public, proof=proof, ticket=ticket)


async def welcomed(table, frame):
    link = await table.knock(frame)
    welcome = unpack((await link.receive()).header.body)
    assert isinstance(welcome, Welcome)
    return link, welcome


def test_a_copy_beside_a_living_device_is_refused_and_the_device_stays(at_table):
    async def test(table):
        device = open_identity(IN_MEMORY)
        link, welcome = await welcomed(table, known_hello(table, device))
        copy = await table.knock(known_hello(table, device, welcome.ticket, "copy"))
        while copy.bytes_received == 0:  # the door listens whether the first one lives
            await link.send(control(Heartbeat(), source=welcome.worker))
            await table.until(lambda: True)
        answer = unpack((await copy.receive()).header.body)
        assert isinstance(answer, Refused)
        assert answer.slug == "join-refused"
        assert f"{device.public[:12]}… of copy is in use by board" in answer.message
        assert list(table.members.by_id) == ["board"]

    at_table(test)


def test_a_device_whose_old_link_is_dead_takes_its_place_back(at_table):
    async def test(table):
        device = open_identity(IN_MEMORY)
        _, welcome = await welcomed(table, known_hello(table, device))
        left = []
        table.members.on_left = lambda member, error: left.append((member.worker, error.message))
        _, again = await welcomed(table, known_hello(table, device, welcome.ticket))
        assert again.worker == welcome.worker == "board"
        assert again.ticket not in ("", welcome.ticket)
        assert left == [("board", "board came back over a new link: its old one was dead")]

    at_table(test, seats=2)


def test_a_device_that_takes_over_in_mid_run_is_first_lost_then_in_again(at_table):
    async def test(table):
        device = open_identity(IN_MEMORY)
        _, welcome = await welcomed(table, known_hello(table, device))
        await table.members.wait_for(1, 1.0)
        await welcomed(table, known_hello(table, device, welcome.ticket))
        with pytest.raises(WorkerLostError, match="came back over a new link"):
            await table.members.next_event()

    at_table(test)


def test_an_old_ticket_is_refused_naming_the_device(at_table):
    async def test(table):
        device = open_identity(IN_MEMORY)
        link, welcome = await welcomed(table, known_hello(table, device))
        await link.send(control(Heartbeat(), source=welcome.worker))
        await table.until(lambda: table.door.guests[0].ticket == welcome.ticket)
        await link.close()
        await table.members.wait_for(0, 1.0)
        answer = await table.answer(known_hello(table, device, "old-ticket", "copy"))
        assert isinstance(answer, Refused)
        assert "of copy was copied: board has joined" in answer.message

    at_table(test)


def test_an_identity_without_its_key_is_refused(at_table):
    async def test(table):
        device, other = open_identity(IN_MEMORY), open_identity(IN_MEMORY)
        proof = other.prove(coordinator=table.door.fingerprint, token=table.token, ticket="", nonce="")
        answer = await table.answer(table.hello(table.token, identity=device.public, proof=proof))
        assert isinstance(answer, Refused)
        assert "is not proven" in answer.message

    at_table(test)


def test_what_was_still_on_its_way_from_a_dead_link_does_not_make_its_device_a_copy(at_table):
    async def test(table):
        device = open_identity(IN_MEMORY)
        link, welcome = await welcomed(table, known_hello(table, device))
        back = await table.knock(known_hello(table, device, welcome.ticket))
        await table.until(lambda: sum(link.is_accepted for link in table.server._links) < len(table.server._links))
        await link.send(control(Heartbeat(), source=welcome.worker))
        answer = unpack((await back.receive()).header.body)
        assert isinstance(answer, Welcome)
        assert answer.worker == welcome.worker

    at_table(test)
