"""A run that rests: asked for by people, obeyed by the loop that feeds the workers, where nothing is lost."""

from collections.abc import Callable

from coterie.errors import ControlRefusedError


class Pause:
    """Whether a run is to rest, and whether it does. Used from the event loop's thread only.

    `on_change` is called after each change of `is_asked`: whoever waits for workers' words looks again.
    """

    def __init__(self) -> None:
        self._refusal = "it has not begun to train"
        self._asked = False
        self.is_resting = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def is_asked(self) -> bool:
        """Whether the run is to rest at the next place where it can."""
        return self._asked

    def allow(self) -> None:
        """From now on the run can rest."""
        self._refusal = ""

    def refuse(self, reason: str) -> None:
        """From now on it cannot, and goes on if it rests; `reason` completes "it cannot be paused: …"."""
        self._refusal = reason
        self.end()

    def ask(self) -> None:
        """Let the run rest; nothing happens if it does.

        Raises:
            ControlRefusedError: This run cannot.
        """
        if self._refusal:
            raise ControlRefusedError(
                f"the run cannot be paused now: {self._refusal}",
                hint="`coterie stop` ends it with what it has, and `--resume` goes on from there",
            )
        if not self._asked:
            self._asked = True
            self.on_change()

    def end(self) -> None:
        """Let the run go on; nothing happens if it does."""
        if self._asked:
            self._asked = False
            self.on_change()
