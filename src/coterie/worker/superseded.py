"""What wakes the compute thread when its plan is over: no failure of anybody."""

from coterie.errors import CoterieError


class SupersededError(CoterieError):
    """Another plan takes effect, or the worker is leaving: what waits for data or for room need not wait on."""
