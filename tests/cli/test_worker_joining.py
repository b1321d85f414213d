"""How `coterie worker` gets its join link: given, from a file, or found in the network."""

import argparse
import io

import pytest

from coterie.cli import worker_joining
from coterie.cli.worker_joining import join_link_of
from coterie.errors import MissingPackageError, UsageError
from coterie.transport import discovery, pairing
from coterie.transport.discovery import FoundRun
from coterie.transport.join_link import JoinLink

LINK = f"coterie://10.0.0.1:4711/?fp={'ab' * 32}#a-token-of-a-run"


def found(run="run-1", host="10.0.0.1"):
    return FoundRun(run=run, hosts=(host,), port=4711, fingerprint_prefix="ab" * 8)


def flags(**given):
    return argparse.Namespace(**({"link": None, "link_file": None, "token": None, "run_id": None} | given))


@pytest.fixture(autouse=True)
def _no_variables_and_no_terminal(monkeypatch):
    for name in (worker_joining.JOIN_LINK_VARIABLE, worker_joining.TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture
def network(monkeypatch):
    """Says which runs are announced; whoever answers there knows every token."""

    def announce(*runs):
        async def find(_seconds):
            return runs

        monkeypatch.setattr(discovery, "require_discovery", lambda: None)
        monkeypatch.setattr(discovery, "find_runs", find)

        def pair(run, token):
            return JoinLink(hosts=run.hosts, port=run.port, fingerprint="ab" * 32, token=token)

        monkeypatch.setattr(pairing, "pair", pair)

    return announce


def test_a_link_comes_from_the_command_line_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "link").write_text(f"{LINK}\n")
    assert join_link_of(flags(link=LINK)).to_text() == LINK
    assert join_link_of(flags(link_file=tmp_path / "link")).to_text() == LINK
    monkeypatch.setenv(worker_joining.JOIN_LINK_VARIABLE, LINK)
    assert join_link_of(flags()).to_text() == LINK


def test_two_sources_or_an_unreadable_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match="a join link and a file"):
        join_link_of(flags(link=LINK, link_file=tmp_path / "link"))
    with pytest.raises(UsageError, match="cannot be read"):
        join_link_of(flags(link_file=tmp_path / "absent"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        join_link_of(flags(link_file=tmp_path / "empty"))
    with pytest.raises(UsageError, match="--token and --run are for runs that are found"):
        join_link_of(flags(link=LINK, token="a-token-of-a-run"))


def test_the_one_run_that_is_found_is_joined_with_the_token(network, monkeypatch):
    network(found())
    assert join_link_of(flags(token="a-token-of-a-run")).to_text() == LINK
    monkeypatch.setenv(worker_joining.TOKEN_VARIABLE, "a-token-of-a-run")
    assert join_link_of(flags()).to_text() == LINK


def test_without_a_token_and_without_a_terminal_to_ask_at_it_says_where_the_token_is(network):
    network(found())
    with pytest.raises(UsageError, match="run-1 was found, and no token was given") as caught:
        join_link_of(flags())
    assert "behind #" in caught.value.hint


def test_of_several_runs_one_must_be_chosen(network):
    network(found(), found("run-2", "10.0.0.2"))
    with pytest.raises(UsageError, match="2 runs are announced") as caught:
        join_link_of(flags(token="a-token-of-a-run"))
    assert "run-2 at 10.0.0.2 port 4711" in caught.value.message
    assert join_link_of(flags(token="a-token-of-a-run", run_id="run-2")).hosts == ("10.0.0.2",)
    with pytest.raises(UsageError, match="no run run-3 is announced"):
        join_link_of(flags(token="a-token-of-a-run", run_id="run-3"))


def test_where_nothing_is_announced_the_link_is_what_is_missing(network):
    network()
    with pytest.raises(UsageError, match="no join link was given, and no run is announced"):
        join_link_of(flags())


def test_without_the_package_the_hint_says_both_ways(monkeypatch):
    def absent():
        raise MissingPackageError("runs are found by zeroconf, which is not installed", hint="pip install …, or copy")

    monkeypatch.setattr(discovery, "require_discovery", absent)
    with pytest.raises(UsageError, match="no join link was given, and runs are found by zeroconf") as caught:
        join_link_of(flags())
    assert "or copy" in caught.value.hint
