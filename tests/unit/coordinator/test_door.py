"""Who may come in, and what a killed coordinator still knows of it."""

import stat
from pathlib import Path

import pytest

from coterie.clock import FakeClock
from coterie.cluster.messages import Hello
from coterie.cluster.wire_version import WIRE_VERSION
from coterie.coordinator.door import Door
from coterie.errors import JoinRefusedError, StorageError
from coterie.ids import WorkerId
from coterie.transport.identity import DeviceIdentity, open_identity
from coterie.transport.user_settings import IN_MEMORY

BOARD = WorkerId("board")


def hello(door: Door, token: str, device: DeviceIdentity | None = None, ticket: str = "", name: str = "board") -> Hello:
    proof = ""
    if device is not None:
        proof = device.prove(coordinator=door.fingerprint, token=token, ticket=ticket, nonce="ab")
    return Hello(
        wire_version=WIRE_VERSION,
        package_version="0",
        token=token,
        name=name,
        device_type="cpu",
        threads=1,
        memory_bytes=1,
        host_id="here",
        hosts=(),
        port=0,
        fingerprint="ab",
        identity=device.public if device else "",
        proof=proof,
        ticket=ticket,
    )


@pytest.fixture
def device() -> DeviceIdentity:
    return open_identity(IN_MEMORY)


def test_a_device_that_was_in_needs_no_token_to_come_back(device):
    door = Door()
    token = door.issue(uses=1)
    first = hello(door, token, device)
    assert door.knock(first) is None
    ticket = door.let_in(first, BOARD)
    for _ in range(3):
        again = hello(door, token, device, ticket)
        assert door.knock(again) == BOARD
        ticket = door.let_in(again, BOARD)
        door.heard(again)
    with pytest.raises(JoinRefusedError, match="used up"):
        door.knock(hello(door, token, open_identity(IN_MEMORY)))


def test_a_device_without_an_identity_takes_a_use_each_time():
    door = Door()
    token = door.issue(uses=1)
    door.knock(hello(door, token))
    assert door.let_in(hello(door, token), BOARD) == ""
    with pytest.raises(JoinRefusedError, match="used up"):
        door.knock(hello(door, token))


def test_an_identity_that_shows_an_old_ticket_was_copied(device):
    door = Door()
    token = door.issue(uses=1)
    first = hello(door, token, device)
    door.knock(first)
    old = door.let_in(first, BOARD)
    door.heard(first)
    copy = hello(door, token, device, old, name="copy")
    door.knock(copy)
    door.let_in(copy, WorkerId("copy"))
    door.heard(copy)
    for ticket in (old, "", "\ud800", "x" * 10_000):
        with pytest.raises(JoinRefusedError, match=rf"{device.public[:12]}… of board was copied: copy has joined"):
            door.knock(hello(door, token, device, ticket))


def test_a_welcome_that_was_lost_on_its_way_is_no_copy(device):
    door = Door()
    token = door.issue(uses=1)
    first = hello(door, token, device)
    door.knock(first)
    door.let_in(first, BOARD)
    lost = hello(door, token, device)  # its first ticket never came
    assert door.knock(lost) == BOARD
    kept = door.let_in(lost, BOARD)
    door.heard(lost)
    again = hello(door, token, device, kept)
    door.knock(again)
    door.let_in(again, BOARD)  # and this one did not either
    assert door.knock(hello(door, token, device, kept)) == BOARD


def test_a_proof_made_for_another_coordinator_is_refused(device):
    door, other = Door(), Door()
    token = door.issue()
    with pytest.raises(JoinRefusedError, match="not proven"):
        door.knock(hello(other, token, device))
    door.knock(hello(door, token, device))  # and took no use


def test_a_token_ends_with_its_minutes_but_not_for_who_is_in(device):
    clock = FakeClock()
    door = Door(clock=clock)
    token = door.issue(uses=5, minutes=10)
    first = hello(door, token, device)
    door.knock(first)
    ticket = door.let_in(first, BOARD)
    clock.advance(661)
    with pytest.raises(JoinRefusedError, match="expired 61 s ago"):
        door.knock(hello(door, token, open_identity(IN_MEMORY)))
    assert door.knock(hello(door, token, device, ticket)) == BOARD


def test_who_is_turned_away_or_leaves_early_leaves_the_token_as_it_was(device):
    door = Door()
    token = door.issue(uses=1)
    first = hello(door, token, device)
    door.knock(first)
    door.turn_away(first)
    door.knock(first)
    door.let_in(first, BOARD)
    door.left_early(first)
    assert door.guests == ()
    door.knock(hello(door, token, open_identity(IN_MEMORY)))


def test_a_killed_coordinator_opens_the_same_door_again(tmp_path: Path, device):
    folder = tmp_path / "door"
    door = Door(folder)
    door.opened(4711)
    token = door.issue(uses=2)
    first = hello(door, token, device)
    door.knock(first)
    ticket = door.let_in(first, BOARD)
    door.heard(first)
    again = Door(folder, reopen=True)
    assert (again.fingerprint, again.port) == (door.fingerprint, 4711)
    assert again.knock(hello(again, token, device, ticket)) == BOARD
    other = hello(again, token, open_identity(IN_MEMORY))
    again.knock(other)
    again.let_in(other, WorkerId("other"))
    with pytest.raises(JoinRefusedError, match="used up"):
        Door(folder, reopen=True).knock(hello(again, token))


def test_a_device_from_before_the_kill_keeps_its_place_if_it_leaves_before_the_run_goes_on(tmp_path: Path, device):
    door = Door(tmp_path)
    first = hello(door, door.issue(uses=1), device)
    door.knock(first)
    ticket = door.let_in(first, BOARD)
    again = Door(tmp_path, reopen=True)
    back = hello(again, "", device, ticket)
    again.knock(back)
    ticket = again.let_in(back, BOARD)
    again.left_early(back)
    assert again.knock(hello(again, "", device, ticket)) == BOARD


def test_a_fresh_run_makes_a_fresh_door(tmp_path: Path):
    old = Door(tmp_path)
    token = old.issue(uses=5)
    fresh = Door(tmp_path)
    assert fresh.fingerprint != old.fingerprint
    with pytest.raises(JoinRefusedError, match="not known"):
        fresh.knock(hello(fresh, token))


def test_only_the_user_can_read_what_is_kept_and_no_token_stands_in_it(tmp_path: Path):
    folder = tmp_path / "door"
    token = Door(folder).issue()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert len(files) == 2
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert token.encode() not in file.read_bytes()


@pytest.mark.parametrize("name", ["certificate.json", "book.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_a_damaged_door_is_made_anew(tmp_path: Path, name: str, content: bytes):
    old = Door(tmp_path)
    old.opened(4711)
    (tmp_path / name).write_bytes(content)
    again = Door(tmp_path, reopen=True)
    assert again.fingerprint != old.fingerprint
    assert again.port == 0


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot keep who may join"):
        Door(tmp_path / "file" / "door")


def test_a_device_is_let_in_while_nothing_can_be_written_and_written_down_as_soon_as_it_can(tmp_path, device, caplog):
    clock = FakeClock()
    folder, away = tmp_path / "door", tmp_path / "away"
    door = Door(folder, clock=clock)
    token = door.issue(uses=1)
    folder.rename(away)
    folder.write_text("in the way: like a full disk, it lets nobody write")
    first = hello(door, token, device)
    door.knock(first)
    ticket = door.let_in(first, BOARD)
    door.heard(first)
    again = hello(door, token, device, ticket)
    assert door.knock(again) == BOARD
    ticket = door.let_in(again, BOARD)
    door.heard(again)
    assert caplog.text.count("cannot keep who may join") == 1, "said once"
    folder.unlink()
    away.rename(folder)
    clock.advance(60.0)
    door.heard(again)
    reopened = Door(folder, clock=clock, reopen=True)
    assert reopened.knock(hello(reopened, token, device, ticket)) == BOARD


def test_a_standing_door_knows_devices_of_earlier_runs_and_no_token_of_theirs(tmp_path, device):
    first = Door(tmp_path, standing=True)
    first.opened(4711)
    told, own = first.issue(uses=5), first.issue(uses=5, own=True)
    here = open_identity(IN_MEMORY)
    tickets = {}
    for token, guest in ((told, device), (own, here)):
        knocks = hello(first, token, guest)
        first.knock(knocks)
        tickets[guest] = first.let_in(knocks, BOARD)
    second = Door(tmp_path, standing=True)
    assert (second.fingerprint, second.port) == (first.fingerprint, 4711)
    assert second.knock(hello(second, told, device, tickets[device])) == BOARD
    for token, guest in ((told, open_identity(IN_MEMORY)), (own, here)):
        with pytest.raises(JoinRefusedError, match="not known"):
            second.knock(hello(second, token, guest, tickets.get(guest, "")))
