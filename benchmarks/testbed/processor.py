"""Taking processor time away from a process that runs: by a cgroup's quota, or without root by stopping it in turns."""

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Protocol

from testbed.facilities import CGROUP

PERIOD_S = 0.04
"""The kernel's smallest quota is 1 ms and a smaller one fails in silence: here that is a fortieth of a core."""
LEAST_QUOTA_US = 1000


class Throttle(Protocol):
    """A limit on one process; `name` says by what."""

    name: str

    def set_share(self, share: float) -> None:
        """Let it have this part of a core; 1 or more lifts the limit."""
        ...

    def close(self) -> None:
        """Lift the limit."""
        ...


class GroupThrottle:
    """A cgroup of version 1 with a quota; exact to a few percent."""

    name = "cgroup quota"

    def __init__(self, pid: int) -> None:
        self._folder = CGROUP / "cpu" / f"coterie-bed-{pid}"
        self._pid = pid
        self._folder.mkdir()
        (self._folder / "cpu.cfs_period_us").write_text(str(int(PERIOD_S * 1e6)))
        (self._folder / "cgroup.procs").write_text(str(pid))

    def set_share(self, share: float) -> None:
        """See `Throttle`."""
        quota = max(int(share * PERIOD_S * 1e6), LEAST_QUOTA_US) if share < 1 else -1
        file = self._folder / "cpu.cfs_quota_us"
        file.write_text(str(quota))
        if int(file.read_text()) != quota:
            raise OSError(f"the kernel did not take a quota of {quota} µs")

    def close(self) -> None:
        """See `Throttle`."""
        with contextlib.suppress(OSError):  # the process has ended
            (CGROUP / "cpu" / "cgroup.procs").write_text(str(self._pid))
        with contextlib.suppress(OSError):  # it is still ending; an empty group costs nothing
            self._folder.rmdir()


class TurnThrottle:
    """Stops and continues the process in turns; needs no root, and is wrong by up to half on a busy machine."""

    name = "stopped in turns"

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._share = 1.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._take_turns, name="throttle", daemon=True)
        self._thread.start()

    def set_share(self, share: float) -> None:
        """See `Throttle`."""
        self._share = share

    def close(self) -> None:
        """See `Throttle`."""
        self._ended.set()
        self._thread.join()

    def _take_turns(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not self._ended.wait(PERIOD_S * min(self._share, 1.0)):
                if self._share < 1:
                    os.kill(self._pid, signal.SIGSTOP)
                    self._ended.wait(PERIOD_S * (1 - self._share))
                    os.kill(self._pid, signal.SIGCONT)


def throttle(pid: int) -> Throttle:
    """The best that this machine gives."""
    if Path(CGROUP / "cpu" / "cgroup.procs").exists():
        with contextlib.suppress(OSError):
            return GroupThrottle(pid)
    return TurnThrottle(pid)
