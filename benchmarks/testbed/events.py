"""What a run writes down, read while it runs."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
POLL_S = 0.02


class Events:
    """The records of a run's `events.jsonl`, read on from where the last look ended."""

    def __init__(self, run: Path) -> None:
        self._path = run / "events.jsonl"
        self._offset = 0
        self.records: list[Record] = []

    def look(self) -> list[Record]:
        """Take in what was written since; all records so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self.records += map(json.loads, whole.splitlines())
        return self.records

    def of(self, kind: str) -> list[Record]:
        """The records of one type so far."""
        return [record for record in self.look() if record["type"] == kind]

    def steps(self) -> int:
        """Optimizer steps that the run has got to (replayed ones count once)."""
        return max((record["step"] + 1 for record in self.of("step")), default=0)

    def stage_workers(self) -> list[str]:
        """Who holds which stage in the newest plan; empty before there is one."""
        plans = self.of("plan")
        return [stage["worker"] for stage in plans[-1]["stages"]] if plans else []

    def losses(self) -> list[float]:
        """Each step's loss; of a replayed step the last one."""
        by_step = {record["step"]: record["loss"] for record in self.of("step")}
        return [by_step[step] for step in sorted(by_step)]


def wait_for(what: str, condition: Callable[[], object], *, timeout_s: float, alive: Callable[[], object]) -> None:
    """Poll until `condition()` holds.

    Args:
        what: For the message if it does not come.
        condition: Asked every few milliseconds.
        timeout_s: How long to wait.
        alive: Falsy: whoever it is waited for is gone, and waiting is no use.

    Raises:
        TimeoutError: It did not happen in time, or cannot any more.
    """
    for _ in ticks(timeout_s):
        gone = not alive()  # asked first: its last act may have been what is waited for
        if condition():
            return
        if gone:
            raise TimeoutError(f"{what}: the process ended before")
    raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")


def ticks(timeout_s: float) -> Iterator[None]:
    """Polls until the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        yield
        time.sleep(POLL_S)
