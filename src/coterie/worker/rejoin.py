"""Coming back to a coordinator that was lost: it may have been killed and started again, or the network was away."""

import asyncio
import itertools
import os
import random
import sys
from collections.abc import Iterator

from coterie.clock import Clock
from coterie.errors import JoinRefusedError, NetworkError
from coterie.logs import get_logger
from coterie.transport.connect import connect
from coterie.transport.join_link import JoinLink
from coterie.transport.stream_link import StreamLink

log = get_logger(__name__)

FIRST_PAUSE_S = 0.3
LONGEST_PAUSE_S = 15.0
GROWTH = 1.6
JITTER = 0.3
"""Share by which a pause is longer or shorter, so that many workers do not dial in the same moment."""


def pauses(draw: random.Random) -> Iterator[float]:
    """Seconds to wait before each attempt, growing up to a limit; without end."""
    for attempt in itertools.count():
        pause_s = min(FIRST_PAUSE_S * GROWTH ** min(attempt, 64), LONGEST_PAUSE_S)
        yield pause_s * draw.uniform(1 - JITTER, 1 + JITTER)


class Redial:
    """Attempts to reach one coordinator again, until a deadline.

    Args:
        join: The link of the first joining; it stays good.
        limit_s: For how long.
        clock: Tells when that is over.
        parent: Process that started this one and is the coordinator's; 0: none. Without it nobody comes back.
    """

    def __init__(self, join: JoinLink, limit_s: float, clock: Clock, *, parent: int = 0) -> None:
        self._join = join
        self._clock = clock
        self._deadline_s = clock.now() + limit_s
        self._limit_s = limit_s
        self._parent = parent
        self._pauses = pauses(random.Random())  # noqa: S311 - no secret: when to dial

    async def next_link(self) -> StreamLink:
        """Wait a while, and dial until somebody answers with the right certificate.

        Raises:
            NetworkError: Nobody has until the deadline, or the coordinator's machine is this one and it is gone.
            VersionMismatchError: Another version of the program answers.
        """
        for pause_s in self._pauses:
            left_s = self._deadline_s - self._clock.now()
            if left_s <= 0 or (self._parent and not is_parent(self._parent)):
                break
            await asyncio.sleep(min(pause_s, left_s))
            try:
                return await connect(self._join)
            except (NetworkError, JoinRefusedError) as error:  # another certificate: another network, maybe
                log.info("the coordinator does not answer yet: %s", error.message)
        raise NetworkError(
            f"the coordinator did not come back within {self._limit_s:.0f} s",
            hint="start the worker again when the run goes on",
        )


def is_parent(process: int) -> bool:
    """Whether a process is still there that started this one; where systems do not tell, it is believed to be."""
    return sys.platform == "win32" or os.getppid() == process
