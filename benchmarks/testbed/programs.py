"""The processes of a test bed: `coterie train` in one place, `coterie worker` on each host."""

import re
import signal
from pathlib import Path

from coterie.local import JOIN_LINK_VARIABLE
from coterie.transport.join_link import JoinLink
from testbed.events import Events, wait_for
from testbed.launching import Launch, Running, send, wait_for_end

_LINK = re.compile(r"coterie://\S+?(?='|\s|$)", re.MULTILINE)
KILL_S = 30.0
START_S = 180.0
"""For a process to import torch and say something, on a busy machine."""


class Program:
    """One `coterie` command in a process and a folder of its own: caches, keys and known devices are its own, too.

    Args:
        name: For its log file.
        folder: Where its state and log are kept, over restarts.
        launch: How its process is started.
        cache: Where it keeps measurements and frozen weights; in its folder by default.
    """

    def __init__(self, name: str, folder: Path, launch: Launch, cache: Path | None = None) -> None:
        self.name = name
        self.folder = folder
        self._cache = cache or folder / "cache"
        self.log = folder / "output.log"
        self._launch = launch
        self._running: Running | None = None
        self._frozen = False
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, words: list[str], **environment: str) -> None:
        """Start the command; its output is added to the log."""
        assert not self.runs, f"{self.name} runs already"
        own = {"COTERIE_CACHE": str(self._cache), "XDG_STATE_HOME": str(self.folder / "state")}
        own |= {"XDG_CONFIG_HOME": str(self.folder / "config"), "XDG_DATA_HOME": str(self.folder / "data")}
        self._running = self._launch(words, own | environment, self.log)

    @property
    def runs(self) -> bool:
        """Whether its process is there (frozen ones are)."""
        return self._running is not None and self._running.poll() is None

    @property
    def pid(self) -> int:
        """Of its newest process."""
        assert self._running is not None
        return self._running.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self._running is None else self._running.poll()

    def said(self) -> str:
        """All it has printed so far, over restarts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        """SIGKILL: gone, without a word."""
        if self._running is not None:
            self._signal(signal.SIGKILL)
            wait_for_end(self._running, KILL_S)
            self._frozen = False

    def freeze(self) -> None:
        """SIGSTOP: it stands still and keeps its connections, as a device that sleeps."""
        self._signal(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self._frozen = False

    def ask_to_end(self) -> None:
        """SIGTERM: its owner wants it to stop."""
        self._signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Until it ends; its exit code.

        Raises:
            TimeoutError: It does not.
        """
        assert self._running is not None
        try:
            return wait_for_end(self._running, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{self.name}: {error}; see {self.log}") from None

    def end(self, patience_s: float = 10.0) -> None:
        """End it whatever it does; first kindly, so that its own children end too."""
        if not self.runs:
            return
        if self._frozen:
            self.thaw()
        self.ask_to_end()
        try:
            self.wait(patience_s)
        except TimeoutError:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._running is not None:
            send(self._running, number)


class CoordinatorProgram(Program):
    """`coterie train`, with workers that join by its link.

    Args:
        words: Flags of `coterie train`: model, data, and so on; host, output and the number of workers are added.
        output: The run's folder.
        host: Where to listen.
        workers: How many it begins with.
        folder, launch: See `Program`.
    """

    def __init__(
        self, words: list[str], output: Path, *, host: str, workers: int, folder: Path, launch: Launch
    ) -> None:
        super().__init__("coordinator", folder, launch)
        self.output = output
        self.events = Events(output)
        self._words = ["train", *words, "--output", str(output), "--host", host, "--workers", str(workers)]

    def start(self, *, resume: bool = False) -> None:
        """Begin the run, or go on after a kill."""
        self.run([*self._words, *(["--resume"] if resume else [])])

    def join_link(self) -> JoinLink:
        """The link that it prints; waits for it."""
        wait_for("the join link", lambda: _LINK.search(self.said()), timeout_s=START_S, alive=lambda: self.runs)
        return JoinLink.from_text(_LINK.findall(self.said())[-1])


class WorkerProgram(Program):
    """`coterie worker` on one host."""

    def join(self, link: JoinLink, words: list[str]) -> None:
        """Start the worker; the link is no word of its command line, as that is no place for a secret."""
        self.run(["worker", *words], **{JOIN_LINK_VARIABLE: link.to_text()})
