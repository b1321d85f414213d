"""One device of a test bed: a worker's process with limits of its own, and all that can happen to a device."""

from pathlib import Path

import msgspec

from coterie.transport.join_link import JoinLink
from testbed.carriers import MBIT, Cut, Line, Shape
from testbed.launching import Launch
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
        words: Further flags of `coterie worker`.
    """

    name: str
    speed: float = 1.0
    memory: str = ""
    shape: Shape = Shape()
    words: tuple[str, ...] = ()


class Host(WorkerProgram):
    """A worker that can be killed, frozen, cut off, slowed and started again.

    Args:
        settings: What it is.
        line: Its link to the others.
        folder: Its state and its log.
        launch: How its processes are started.
    """

    def __init__(self, settings: HostSettings, line: Line, folder: Path, launch: Launch) -> None:
        super().__init__(settings.name, folder, launch)
        self.settings = settings
        self._line = line
        self._link: JoinLink | None = None
        self._line.shape(settings.shape)

    def start(self, link: JoinLink | None = None) -> None:
        """Join; again after it ended, with the link of before if none is given."""
        settings = self.settings
        if link is not None:
            self._link = self._line.reach(link)
        assert self._link is not None, "the first start needs a link"
        words = ["--name", settings.name, "--threads", "1", "--speed", str(settings.speed)]
        words += [] if self._line.direct_links else ["--no-direct-links"]
        words += ["--memory", settings.memory, "--enforce-memory"] if settings.memory else []
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
