import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import JoinRefusedError, UsageError
from coterie.transport.identity import check_proof, open_identity, short
from coterie.transport.user_settings import IDENTITY_VARIABLE, IN_MEMORY, config_folder

HERE = {"coordinator": "ab" * 32, "token": "a-token", "ticket": "a-ticket", "nonce": "cd" * 32}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CONFIG", str(tmp_path / "config"))
    monkeypatch.delenv(IDENTITY_VARIABLE, raising=False)


def test_a_proof_fits_the_coordinator_token_ticket_and_start_that_it_was_made_for():
    device = open_identity(IN_MEMORY)
    check_proof(device.public, device.prove(**HERE), **HERE)


@pytest.mark.parametrize("changed", HERE)
def test_a_proof_for_one_coordinator_or_joining_is_none_for_another(changed: str):
    device = open_identity(IN_MEMORY)
    with pytest.raises(JoinRefusedError, match=f"{device.public[:12]}… is not proven"):
        check_proof(device.public, device.prove(**HERE), **(HERE | {changed: "another"}))


def test_a_part_of_one_field_cannot_be_moved_into_the_next():
    device = open_identity(IN_MEMORY)
    proof = device.prove(coordinator="c", token="ab", ticket="c", nonce="n")
    with pytest.raises(JoinRefusedError):
        check_proof(device.public, proof, coordinator="c", token="a", ticket="bc", nonce="n")


@given(identity=st.text(max_size=70), proof=st.text(max_size=130))
def test_whatever_a_peer_sends_as_identity_and_proof_is_refused(identity: str, proof: str):
    with pytest.raises(JoinRefusedError):
        check_proof(identity, proof, **HERE)


def test_a_device_has_the_same_identity_at_every_start_and_only_its_user_can_read_it():
    first = open_identity()
    assert first.path is not None
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    first.keep_ticket("ab", "t1")
    first.close()
    again = open_identity()
    assert again.public == first.public
    assert again.ticket_for("ab") == "t1"
    assert again.ticket_for("cd") == ""
    assert stat.S_IMODE(first.path.with_name("identity.tickets").stat().st_mode) == 0o600
    again.close()


def test_two_workers_on_one_machine_have_two_identities_and_keep_them():
    first, second = open_identity(), open_identity()
    assert first.public != second.public
    for device in (first, second):
        device.close()
    again = open_identity()
    assert again.public == first.public
    again.close()


def test_a_file_that_another_worker_uses_is_refused(tmp_path: Path):
    device = open_identity(tmp_path / "key")
    with pytest.raises(UsageError, match="another worker on this machine uses the identity"):
        open_identity(tmp_path / "key")
    device.close()


def test_the_environment_names_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(IDENTITY_VARIABLE, str(tmp_path / "elsewhere"))
    device = open_identity()
    assert device.path == tmp_path / "elsewhere"
    device.close()


def test_an_identity_in_memory_leaves_no_file(tmp_path: Path):
    device = open_identity(IN_MEMORY)
    device.keep_ticket("ab", "t")
    assert device.ticket_for("ab") == "t"
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "content", [b"", b"not a key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_file_without_a_key_is_refused_and_left_alone(tmp_path: Path, content: bytes):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UsageError, match="holds no key"):
        open_identity(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content


def test_a_new_key_in_the_place_of_a_deleted_one_begins_without_its_tickets(tmp_path: Path):
    device = open_identity(tmp_path / "key")
    device.keep_ticket("ab", "t")
    device.close()
    (tmp_path / "key").unlink()
    again = open_identity(tmp_path / "key")
    assert again.public != device.public
    assert again.ticket_for("ab") == ""
    again.close()


def test_only_the_latest_tickets_are_kept():
    device = open_identity(IN_MEMORY)
    for number in range(100):
        device.keep_ticket(f"run-{number}", "t")
    assert device.ticket_for("run-99") == "t"
    assert device.ticket_for("run-0") == ""


def test_printing_an_identity_shows_no_more_than_the_beginning_of_its_public_half():
    device = open_identity(IN_MEMORY)
    assert repr(device) == f"DeviceIdentity({short(device.public)})"


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_CONFIG_HOME": "/x"}, Path("/x/coterie")),
        ("linux", {"XDG_CONFIG_HOME": "relative"}, Path.home() / ".config" / "coterie"),
        ("darwin", {}, Path.home() / "Library" / "Application Support" / "coterie"),
        ("win32", {"APPDATA": "/roaming"}, Path("/roaming/coterie")),
        ("linux", {"COTERIE_CONFIG": "/mine"}, Path("/mine")),
    ],
)
def test_settings_are_kept_where_the_platform_keeps_them(platform: str, environment: dict[str, str], expected: Path):
    assert config_folder(environment, platform) == expected
