"""For callers who want the result and nothing else."""

from coterie.metrics.records import AnyRecord
from coterie.planner.plan import Plan


class QuietObserver:
    """An observer that says nothing."""

    def joinable(self, join_link: str) -> None:
        """Nothing to say."""

    def notice(self, text: str) -> None:
        """Nothing to say."""

    def planned(self, plan: Plan, explanation: str, steps: int) -> None:
        """Nothing to say."""

    def advanced(self, what: str, done: int, total: int) -> None:
        """Nothing to say."""

    def record(self, record: AnyRecord) -> None:
        """Nothing to say."""
