"""The worker's place in the queue for the processor."""

import sys

import psutil

from coterie.logs import get_logger

log = get_logger(__name__)

LOW_NICE = 10


def lower_priority() -> None:
    """Let other programs go first from now on, on all systems that have such an order; it cannot be taken back."""
    process = psutil.Process()
    try:
        if sys.platform == "win32":
            process.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        else:
            process.nice(max(LOW_NICE, int(process.nice())))
    except (OSError, psutil.Error) as error:
        log.info("the worker keeps its priority: %s", error)
