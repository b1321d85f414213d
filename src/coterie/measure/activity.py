"""Does the owner work on this device now: keys and mouse where anybody may ask, else what other programs compute."""

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from coterie.clock import Clock
from coterie.measure.in_background import InBackground
from coterie.measure.programs import output_of

ASK_EVERY_S = 5.0
"""How often another program is asked for the idle time: it starts a process each time."""

_MAC_IDLE = re.compile(r'"HIDIdleTime" = (\d+)')


class ActivityReading(msgspec.Struct, frozen=True, kw_only=True):
    """What others do on this device.

    Attributes:
        others_cores: Processor cores that other programs kept busy since the last reading. A second worker on the same
            device counts too, and in a container so does the host.
        idle_s: Seconds since somebody last touched keyboard or mouse; None if nobody may know.
    """

    others_cores: float
    idle_s: float | None = None


class IdleTime(Protocol):
    """Something that knows when the owner last touched the device."""

    name: str

    def idle_s(self) -> float | None:
        """Seconds since then; None if it cannot tell now."""
        ...


class Activity:
    """Both figures; `read` takes less than a millisecond."""

    def __init__(
        self, idle: IdleTime | None, *, clock: Clock, times: Callable[[], tuple[float, float]] | None = None
    ) -> None:
        """`times()` gives the processor seconds of the whole machine, and of this process with its children."""
        self._idle = idle
        self._clock = clock
        self._times = times or _busy_and_own_s
        self._last = self._times()
        self._last_at_s = clock.now()

    def read(self) -> ActivityReading:
        """Since the last call."""
        now_s, (busy_s, own_s) = self._clock.now(), self._times()
        seconds = max(now_s - self._last_at_s, 1e-3)
        others_s = (busy_s - self._last[0]) - (own_s - self._last[1])
        self._last, self._last_at_s = (busy_s, own_s), now_s
        return ActivityReading(
            others_cores=max(others_s, 0.0) / seconds, idle_s=None if self._idle is None else self._idle.idle_s()
        )


class TerminalIdle:
    """Terminals that people are logged in to: the system notes when each was last typed into. Linux, BSD, macOS."""

    name = "terminals"

    def __init__(self, terminals: Callable[[], Iterable[str]] | None = None) -> None:
        self._terminals = terminals or _terminals

    def idle_s(self) -> float | None:
        """See `IdleTime`."""
        touched = [at_s for terminal in self._terminals() if (at_s := _access_time(terminal)) is not None]
        return max(time.time() - max(touched), 0.0) if touched else None


class ProgramIdle:
    """A program that prints it: `xprintidle` under X11, `ioreg` on macOS."""

    def __init__(self, command: tuple[str, ...], parse: Callable[[str], float | None]) -> None:
        self.name = command[0]
        self._background = InBackground(
            lambda: None if (text := output_of(command)) is None else parse(text), every_s=ASK_EVERY_S, name="idle"
        )

    def idle_s(self) -> float | None:
        """See `IdleTime`; as of the last time that it was asked."""
        return self._background.latest()


class WindowsIdle:
    """What Windows says of the session's last input."""

    name = "GetLastInputInfo"

    def idle_s(self) -> float | None:
        """See `IdleTime`."""
        if sys.platform == "win32":

            class LastInput(ctypes.Structure):
                _fields_ = (("size", ctypes.c_uint), ("at_ms", ctypes.c_uint))

            last = LastInput(size=ctypes.sizeof(LastInput))
            if ctypes.windll.user32.GetLastInputInfo(ctypes.byref(last)):
                return float((ctypes.windll.kernel32.GetTickCount() - last.at_ms) & 0xFFFFFFFF) / 1e3
        return None


class LeastIdle:
    """The least of several: somebody types in one terminal while another lies idle."""

    def __init__(self, sources: tuple[IdleTime, ...]) -> None:
        self._sources = sources
        self.name = ", ".join(source.name for source in sources)

    def idle_s(self) -> float | None:
        """See `IdleTime`."""
        return min((idle for source in self._sources if (idle := source.idle_s()) is not None), default=None)


def find_idle_time() -> IdleTime | None:
    """All ways that this system has; None if it has none (then only what other programs compute is known)."""
    if sys.platform == "win32":
        return WindowsIdle()
    sources: list[IdleTime] = [TerminalIdle()]
    if sys.platform == "darwin":
        sources.append(ProgramIdle(("ioreg", "-c", "IOHIDSystem", "-d", "4"), mac_idle_s))
    elif os.environ.get("DISPLAY") and output_of(("xprintidle",)) is not None:
        sources.append(ProgramIdle(("xprintidle",), x11_idle_s))
    return LeastIdle(tuple(sources))


def mac_idle_s(text: str) -> float | None:
    """Seconds in what `ioreg` prints, which counts nanoseconds."""
    found = _MAC_IDLE.search(text)
    return None if found is None else int(found[1]) / 1e9


def x11_idle_s(text: str) -> float | None:
    """Seconds in what `xprintidle` prints, which counts milliseconds."""
    return int(text) / 1e3 if text.strip().isdigit() else None


def _terminals() -> Iterable[str]:
    try:
        return [f"/dev/{user.terminal}" for user in psutil.users() if user.terminal]
    except (OSError, RuntimeError):  # no record of logins, as in a container
        return []


def _access_time(terminal: str) -> float | None:
    try:
        return Path(terminal).stat().st_atime
    except OSError:
        return None


def _busy_and_own_s() -> tuple[float, float]:
    """Processor seconds of the whole machine, and of this process with its children."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is in user time already.
    every = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    own = psutil.Process().cpu_times()
    return every - idle, own.user + own.system + getattr(own, "children_user", 0.0) + getattr(
        own, "children_system", 0.0
    )
