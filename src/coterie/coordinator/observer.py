"""Who watches a run: the command line, the Python front door, a test."""

from typing import Protocol

from coterie.metrics.records import AnyRecord
from coterie.planner.plan import Plan


class RunObserver(Protocol):
    """Told what happens, in the order in which it does; must not block."""

    def joinable(self, join_link: str) -> None:
        """Workers can join now with this link, which holds the token: show it to the user, never log it."""
        ...

    def notice(self, text: str) -> None:
        """Something worth a line."""
        ...

    def planned(self, plan: Plan, explanation: str, steps: int) -> None:
        """The plan stands; `steps` optimizer steps lie ahead."""
        ...

    def advanced(self, what: str, done: int, total: int) -> None:
        """In a run without training: so many of all rows are `predicted`, or `answered` by generated text."""
        ...

    def record(self, record: AnyRecord) -> None:
        """A record was made."""
        ...
