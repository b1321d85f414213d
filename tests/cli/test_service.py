"""`coterie service`: files written, printed, deleted; the link in a private file and nowhere else."""

import stat
import sys
from pathlib import Path

import pytest

from coterie.cli.main import build_parser
from coterie.cli.service import _flags
from coterie.cli.worker import settings_from
from coterie.transport.join_link import JoinLink

SECRET = "s3cret-token_value"
LINK = f"coterie://192.168.1.5:7878/?fp={'ab' * 32}#{SECRET}"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user's folders, all below one."""
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("COTERIE_CONFIG", "COTERIE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_install_writes_unit_and_link_and_says_how_to_switch_it_on(told, home):
    code, out, err = told("service", "install", LINK, "--memory", "2GiB", "--only-on-power")
    assert (code, err) == (0, "")
    unit = home / "xdg_config_home" / "systemd" / "user" / "coterie-worker.service"
    link_file = home / "xdg_config_home" / "coterie" / "worker.link"
    assert f"written: {unit}" in out
    assert "systemctl --user enable --now coterie-worker" in out
    assert "enable-linger" in out
    assert f"--link-file {link_file} --wait --memory 2GiB --only-on-power" in unit.read_text()
    assert SECRET not in unit.read_text() + out
    assert JoinLink.from_text(link_file.read_text()).to_text() == LINK
    assert stat.S_IMODE(link_file.stat().st_mode) == 0o600


def test_show_prints_what_install_writes(told, home):
    _, shown, words = told("service", "show", "--speed", "0.5")
    assert "what `install` would write" in words
    told("service", "install", LINK, "--speed", "0.5")
    assert (home / "xdg_config_home" / "systemd" / "user" / "coterie-worker.service").read_text() == shown


@pytest.mark.parametrize("system", ["systemd", "launchd", "windows"])
def test_show_prints_what_is_installed_with_its_flags(told, system):
    told("service", "install", LINK, "--memory", "2GiB", "--system", system)
    _, shown, words = told("service", "show", "--system", system)
    assert "2GiB" in shown
    assert words.startswith("installed: ")
    told("service", "remove", "--system", system)
    assert "2GiB" not in told("service", "show", "--system", system)[1]


def test_remove_deletes_the_link_too_and_may_be_repeated(told, home):
    told("service", "install", LINK)
    code, out, _ = told("service", "remove")
    assert code == 0
    assert out.count("deleted: ") == 2
    assert "systemctl --user disable --now coterie-worker" in out
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert told("service", "remove")[1] == "no service of coterie is installed here\n"


@pytest.mark.parametrize("system", ["systemd", "launchd", "windows"])
def test_a_service_finds_the_folders_that_are_chosen_here_and_is_told_no_secret(told, home, monkeypatch, system):
    monkeypatch.chdir(home)
    monkeypatch.setenv("COTERIE_CONFIG", "my settings")
    monkeypatch.setenv("COTERIE_CACHE", str(home / "cache"))
    monkeypatch.setenv("COTERIE_IDENTITY", "memory")
    monkeypatch.setenv("COTERIE_JOIN_TOKEN", SECRET)
    code, shown, err = told("service", "show", "--system", system)
    assert code == 0, err
    assert str(home / "my settings" / "worker.link") in shown
    for value in (home / "my settings", home / "cache", "memory"):
        assert str(value) in shown.partition("COTERIE_CONFIG")[2]
    assert SECRET not in shown


@pytest.mark.parametrize(("system", "first"), [("launchd", "launchctl bootstrap"), ("windows", "schtasks /Create")])
def test_files_for_the_other_systems_are_written_where_these_look_or_are_told_to(answer, home, system, first):
    code, found = answer("service", "install", LINK, "--system", system)
    assert code == 0
    assert found["next"][0].startswith(first)
    content = Path(found["path"]).read_bytes()
    assert SECRET.encode() not in content.replace(b"\0", b"")
    assert Path(found["path"]).is_relative_to(home)
    if system == "windows":
        assert content.decode("utf-16").startswith('<?xml version="1.0" encoding="UTF-16"?>')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("install",), "no join link was given"),
        (("install", "runs/latest"), "begins with coterie://"),
        (("install", LINK, "--speed", "3"), "--speed is 3.0"),
        (("install", LINK, "--name", "a\nExecStartPre=/bin/false"), "--name has characters that cannot be printed"),
        (("show", LINK), "`service show` takes no link"),
        (("start",), "invalid choice: 'start'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(told, home, words, message):
    code, _, err = told("service", *words)
    assert code == 2
    assert message in err
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_a_system_without_services_that_we_know_is_named(told, monkeypatch):
    monkeypatch.setattr(sys, "platform", "emscripten")
    code, _, err = told("service", "show")
    assert code == 2
    assert "emscripten" in err


def test_flags_mean_the_same_to_the_service_as_to_the_worker(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["--name", "x y", "--memory", "1GiB", "--threads", "2", "--yield", "--role", "server", "--cache-folder"]
    parser = build_parser()
    flags = _flags(parser.parse_args(["service", "install", LINK, *words, "c"]))
    direct = settings_from(parser.parse_args(["worker", LINK, *words, str(tmp_path / "c")]))
    assert settings_from(parser.parse_args(["worker", LINK, *flags])) == direct


@pytest.mark.parametrize("flag", ["--identity", "--shard-cache"])
def test_files_that_are_named_from_here_are_the_same_ones_to_a_service_that_starts_elsewhere(
    monkeypatch, tmp_path, flag
):
    monkeypatch.chdir(tmp_path)
    word = {"--identity": "memory", "--shard-cache": "off"}[flag]
    for given, told in (("mine", tmp_path / "mine"), ("~/mine", Path.home() / "mine"), (word, word)):
        assert _flags(build_parser().parse_args(["service", "install", LINK, flag, given])) == (flag, str(told))


def test_a_worker_reads_its_link_from_a_file_and_says_which_if_it_cannot(told, tmp_path):
    code, _, err = told("worker", "--link-file", tmp_path / "none")
    assert code == 2
    assert f"cannot be read from {tmp_path / 'none'}" in err
    (tmp_path / "link").write_text("coterie://h:1/")
    assert "no fingerprint" in told("worker", "--link-file", tmp_path / "link")[2]
    assert "give one of the two" in told("worker", LINK, "--link-file", tmp_path / "link")[2]
