"""A run that rests: asked for by people, obeyed by the loop that feeds the workers, where nothing is lost."""

from collections.abc import Callable
from typing import Protocol

from coterie.clock import Clock, SystemClock
from coterie.errors import ControlRefusedError


class Pausable(Protocol):
    """A loop that can rest: it looks at `is_paused` before each step, and tells `on_idle` whether none is under way."""

    is_paused: bool
    on_idle: Callable[[bool], None]


class Pause:
    """Whether a run is to rest, and whether it does. Used from the event loop's thread only.

    `on_rest` is told when a rest begins and when it is over. `on_change` is called after each change of `is_asked`:
    whoever waits for workers' words looks again.
    """

    def __init__(self, on_rest: Callable[[bool], None] = lambda _resting: None, *, clock: Clock | None = None) -> None:
        self._on_rest = on_rest
        self._clock = clock or SystemClock()
        self._rested_s = 0.0
        self._rests_since_s: float | None = None
        self._refusal = "it has not begun to train"
        self._advice = "ask again when it trains; `coterie status` tells"
        self._asked = False
        self.is_resting = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def rested_s(self) -> float:
        """Seconds of all rests so far."""
        now_s = self._clock.now()
        return self._rested_s + (now_s - self._rests_since_s if self._rests_since_s is not None else 0.0)

    def is_disturbed(self) -> None:
        """A rest is no rest any more while something is repaired; it goes on when the next loop says that it idles."""
        self._rested_s, self._rests_since_s = self.rested_s, None

    def steer(self, loop: Pausable, wake: Callable[[], None], *, on_rested: Callable[[], None]) -> None:
        """From now on the run can rest, by this loop.

        Args:
            loop: Rests when it is asked to.
            wake: Lets it look again.
            on_rested: Called when a rest is over, before the next step.
        """

        def obey() -> None:
            loop.is_paused = self._asked
            wake()

        def note(is_idle: bool) -> None:  # noqa: FBT001 - the loop's callback
            if not is_idle:
                self.is_disturbed()
            elif self._rests_since_s is None:
                self._rests_since_s = self._clock.now()
            rested, self.is_resting = self.is_resting, is_idle
            if rested != is_idle:
                self._on_rest(is_idle)
            if rested and not is_idle:
                on_rested()

        self._refusal = ""
        self.on_change = obey
        loop.is_paused = self._asked
        loop.on_idle = note

    @property
    def is_asked(self) -> bool:
        """Whether the run is to rest at the next place where it can."""
        return self._asked

    def refuse(self, reason: str) -> None:
        """From now on it cannot, and goes on if it rests; `reason` completes "it cannot be paused: …"."""
        self._refusal = reason
        self._advice = "`coterie stop` ends it with what it has, and `--resume` goes on from there"
        self.end()

    def ask(self) -> None:
        """Let the run rest; nothing happens if it does.

        Raises:
            ControlRefusedError: This run cannot.
        """
        if self._refusal:
            raise ControlRefusedError(
                f"the run cannot be paused now: {self._refusal}",
                hint=self._advice,
            )
        if not self._asked:
            self._asked = True
            self.on_change()

    def end(self) -> None:
        """Let the run go on; nothing happens if it does."""
        if self._asked:
            self._asked = False
            self.on_change()
