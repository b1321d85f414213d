"""One device of a test bed: a worker's process with limits of its own, and all that can happen to a device."""

from pathlib import Path

import msgspec

from coterie.transport.join_link import JoinLink
from coterie.units import MIB
from testbed.carriers import MBIT, Cut, Line, Shape
from testbed.launching import Launch
from testbed.processor import Throttle, throttle
from testbed.programs import WorkerProgram

SLOW = Shape(bytes_per_s=5 * MBIT, latency_s=0.02)
"""A bad mobile link."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is.

    Attributes:
        name: The device's name in the run.
        speed: Part of a core's speed, by the worker's own throttle (wall time = CPU time / speed).
        memory: Budget, such as `600MiB`; enforced. Empty: the machine's.
        shape: Its link.
        battery: What its battery says at first, such as `80%` or `30%,-1%/min`; empty: it has none.
        words: Further flags of `coterie worker`.
    """

    name: str
    speed: float = 1.0
    memory: str = ""
    shape: Shape = Shape()
    battery: str = ""
    words: tuple[str, ...] = ()


class Host(WorkerProgram):
    """A worker that can be killed, frozen, cut off, slowed and started again.

    Args:
        settings: What it is.
        line: Its link to the others.
        folder: Its state and its log.
        launch, cache: See `Program`.
    """

    def __init__(
        self, settings: HostSettings, line: Line, folder: Path, launch: Launch, cache: Path | None = None
    ) -> None:
        super().__init__(settings.name, folder, launch, cache)
        self.settings = settings
        self._line = line
        self._link: JoinLink | None = None
        self._throttle: Throttle | None = None
        self._memory = folder / "memory"
        self._battery = folder / "battery"
        self._line.shape(settings.shape)
        if settings.battery:
            self.charge(settings.battery)

    def start(self, link: JoinLink | None = None) -> None:
        """Join; again after it ended, with the link of before if none is given."""
        settings = self.settings
        if link is not None:
            self._link = self._line.reach(link)
        assert self._link is not None, "the first start needs a link"
        words = ["--name", settings.name, "--threads", "1", "--speed", str(settings.speed)]
        words += [] if self._line.direct_links else ["--no-direct-links"]
        words += ["--memory-file", str(self._memory), "--identity", str(self.folder / "identity")]
        words += ["--memory", settings.memory, "--enforce-memory"] if settings.memory else []
        # None: else the machine's own battery, and its owner's work on it, would have a say.
        words += ["--battery", f"simulated:file:{self._battery}" if settings.battery else "none", "--no-keep-awake"]
        self.join(self._link, [*words, *settings.words])

    def cut(self, how: Cut = "silent") -> None:
        """Take its network away: nobody is told (`silent`), or connections end (`closed`)."""
        self._line.cut(how)

    def restore(self) -> None:
        """Give its network back."""
        self._line.restore()

    def shape(self, shape: Shape) -> None:
        """Change its link's rate and latency."""
        self._line.shape(shape)

    def take_memory(self, left_bytes: int) -> None:
        """Another program needs memory: the worker may use so much in all from now on."""
        self._memory.write_text(f"{left_bytes // MIB}MiB")

    def give_memory(self) -> None:
        """That program has ended."""
        self._memory.unlink(missing_ok=True)

    def charge(self, battery: str) -> None:
        """What its battery says from now on, in the words of `--battery simulated:`."""
        new = self._battery.with_suffix(".new")
        new.write_text(battery)
        new.replace(self._battery)

    def slow_down(self, share: float) -> str:
        """Let its process have this part of a core from now on; by what means, in words."""
        if self._throttle is None:
            self._throttle = throttle(self.pid)
        self._throttle.set_share(share)
        return self._throttle.name

    def end(self, patience_s: float = 10.0) -> None:
        """See `Program`."""
        if self._throttle is not None:
            self._throttle.close()
            self._throttle = None
        super().end(patience_s)
