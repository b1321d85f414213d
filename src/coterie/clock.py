"""The only clock. Whoever needs time takes a `Clock`, so that tests can hand in one that jumps."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back, and the date."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean something."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for records that people read."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()


class FakeClock:
    """A clock for tests: stands still until told to `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        """Seconds advanced so far."""
        return self._now

    def wall(self) -> float:
        """The same as `now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass at once."""
        self._now += seconds
