"""Whether a stage's compute thread has come to a standstill: a driver that hangs, a machine that does nothing but swap.

Such a worker gives signs of life, and its links stand: only it can know.
"""

from coterie.planner.plan import StageAssignment

Block = tuple[int, int]
"""What the compute thread does without a break: the plan's version, and a number that is used once in it."""

LEAST_S = 120.0
"""Less may be a first call that compiles, or memory that comes back from a slow disk."""
TIMES = 50
"""As long as a micro-batch's forward, backward and update together were predicted to take."""


def stall_limit_s(stage: StageAssignment) -> float:
    """How long a stage may compute without a break until it counts as stalled."""
    return max(LEAST_S, TIMES * (stage.forward_s + stage.backward_s + stage.update_s))


class StallWatch:
    """Sums up how long one block has taken, by looks at regular intervals.

    A device that sleeps or is frozen does not look either, so that it does not count as stalled when it wakes.

    Args:
        interval_s: Between two looks.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._block: Block | None = None
        self._looks = 0

    def look(self, block: Block | None) -> float:
        """Seconds that the compute thread has been in `block`, at least; 0 where it computes nothing."""
        self._looks = self._looks + 1 if block is not None and block == self._block else 0
        self._block = block
        return self._looks * self._interval_s
