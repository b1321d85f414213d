"""Keeps the machine from going to sleep while the worker computes, where the system offers a way to any user."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol

from coterie.logs import get_logger
from coterie.measure.absent import Absent
from coterie.measure.programs import output_of

log = get_logger(__name__)

END_S = 2.0

_ES_CONTINUOUS = 0x80000000
_ES_SYSTEM_REQUIRED = 0x00000001


class Waker(Protocol):
    """One system's way."""

    name: str

    def hold(self) -> bool:
        """Keep the machine awake from now on; whether that works."""
        ...

    def release(self) -> None:
        """Let it sleep again. Idempotent."""
        ...


class ProgramWaker:
    """A program that keeps the machine awake for as long as it runs; it ends with this process, however that ends.

    The command must end when its input does: that is how it notices.
    """

    def __init__(self, command: tuple[str, ...]) -> None:
        self.name = command[0]
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def hold(self) -> bool:
        """See `Waker`. A program that ends at once has no permission, which is told at the next call."""
        if self._process is not None:
            return self._process.poll() is None
        try:
            self._process = subprocess.Popen(  # noqa: S603 - programs named below, no shell
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError:
            return False
        return True

    def release(self) -> None:
        """See `Waker`."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class TermuxWaker:
    """Android: a wake lock of the app Termux, asked for in threads, since Android takes its time."""

    name = "termux-wake-lock"

    def __init__(self) -> None:
        self._asking: threading.Thread | None = None

    def hold(self) -> bool:
        """See `Waker`."""
        self._ask("termux-wake-lock")
        return True

    def release(self) -> None:
        """See `Waker`."""
        self._ask("termux-wake-unlock")

    def _ask(self, program: str) -> None:
        before = self._asking

        def ask() -> None:
            if before is not None:
                before.join()
            if output_of((program,)) is None:
                log.info("%s cannot keep this device awake", program)

        self._asking = threading.Thread(target=ask, name="awake", daemon=True)
        self._asking.start()


class WindowsWaker:
    """Windows: a wish of the calling thread, which must live on; call both from the same one."""

    name = "SetThreadExecutionState"

    def hold(self) -> bool:
        """See `Waker`."""
        return self._set(_ES_CONTINUOUS | _ES_SYSTEM_REQUIRED)

    def release(self) -> None:
        """See `Waker`."""
        self._set(_ES_CONTINUOUS)

    def _set(self, state: int) -> bool:
        if sys.platform == "win32":
            return bool(ctypes.windll.kernel32.SetThreadExecutionState(state))
        return False


def find_waker() -> Waker | Absent:
    """This system's way, or why there is none."""
    if sys.platform == "win32":
        return WindowsWaker()
    if sys.platform == "darwin":
        return ProgramWaker(("caffeinate", "-i", "-w", str(os.getpid())))
    if shutil.which("termux-wake-lock") is not None:
        return TermuxWaker()
    if shutil.which("systemd-inhibit") is None:
        return Absent(reason="systemd-inhibit is not installed")
    if not Path("/run/systemd/system").is_dir():  # sd_booted(3)
        return Absent(reason="systemd does not run here")
    what = ("systemd-inhibit", "--what=idle:sleep", "--who=coterie", "--why=a worker computes", "--mode=block")
    return ProgramWaker((*what, "cat"))


class KeepAwake:
    """Keeps the machine awake between `hold` and `release`, if its owner wants that and the system can."""

    def __init__(self, waker: Waker | Absent) -> None:
        self._waker = waker
        self._holds = False

    def hold(self) -> None:
        """From now on. Idempotent."""
        if self._holds or isinstance(self._waker, Absent):
            return
        self._holds = self._waker.hold()
        if not self._holds:
            log.info("%s cannot keep this machine awake", self._waker.name)

    def release(self) -> None:
        """No more. Idempotent."""
        if self._holds and not isinstance(self._waker, Absent):
            self._waker.release()
        self._holds = False
