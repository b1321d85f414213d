"""Keeping the machine awake, with a program that ends when its input does."""

import shutil
import sys
from pathlib import Path

import psutil
import pytest

from coterie.measure.absent import Absent
from coterie.worker import keep_awake
from coterie.worker.keep_awake import KeepAwake, ProgramWaker, find_waker

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="starts POSIX programs")


@posix_only
def test_the_program_runs_from_hold_to_release() -> None:
    waker = ProgramWaker(("cat",))
    awake = KeepAwake(waker)
    awake.hold()
    awake.hold()
    assert waker._process is not None
    process = psutil.Process(waker._process.pid)
    assert process.is_running()
    awake.release()
    awake.release()
    assert waker._process is None
    assert not psutil.pid_exists(process.pid) or process.status() == psutil.STATUS_ZOMBIE


@posix_only
def test_a_program_that_cannot_be_started_changes_nothing() -> None:
    awake = KeepAwake(ProgramWaker(("/nonexistent/inhibit",)))
    awake.hold()
    awake.release()


def test_where_there_is_no_way_nothing_is_done() -> None:
    awake = KeepAwake(Absent(reason="none here"))
    awake.hold()
    awake.release()


@pytest.mark.skipif(sys.platform != "linux", reason="asks for Linux's ways")
def test_on_linux_the_way_is_termux_or_systemd_or_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_waker()
    assert isinstance(found, Absent)
    assert "systemd-inhibit" in found.reason
    (tmp_path / "termux-wake-lock").write_text("#!/bin/sh\n")
    (tmp_path / "termux-wake-lock").chmod(0o755)
    assert shutil.which("termux-wake-lock")
    assert isinstance(find_waker(), keep_awake.TermuxWaker)


@posix_only
def test_a_wake_lock_of_termux_is_taken_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    calls = tmp_path / "calls"
    for name in ("termux-wake-lock", "termux-wake-unlock"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {calls}\n")
        (tmp_path / name).chmod(0o755)
    waker = keep_awake.TermuxWaker()
    assert waker.hold()
    waker.release()
    assert waker._asking is not None
    waker._asking.join(60)
    assert calls.read_text().split() == ["termux-wake-lock", "termux-wake-unlock"]
