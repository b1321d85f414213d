"""The ways from one stage to everybody: direct where there is a link, else through the coordinator."""

import asyncio
import sys
from collections.abc import Iterable, Mapping

from coterie.errors import CoterieError
from coterie.ids import COORDINATOR, WorkerId
from coterie.transport.stream_link import StreamLink
from coterie.units import MIB
from coterie.worker.outbox import Outbox

UNSENT_LIMIT_BYTES = 32 * MIB
"""Tensors waiting for a slow link before its stage waits too."""


class Outboxes:
    """One outbox for each link. They belong to one plan; the links outlive them. Made on the event loop.

    Args:
        coordinator: The link to it.
        direct: Those to other workers.
    """

    def __init__(self, coordinator: StreamLink, direct: Mapping[WorkerId, StreamLink]) -> None:
        self._loop = asyncio.get_running_loop()
        self._links = {**direct, COORDINATOR: coordinator}
        self._by_worker = {worker: self._outbox(link) for worker, link in self._links.items()}
        self._aside: list[Outbox] = []
        self.direct = frozenset(direct)
        """Workers that are reached without the coordinator."""

    def _outbox(self, link: StreamLink, limit_bytes: int = UNSENT_LIMIT_BYTES) -> Outbox:
        return Outbox(link, self._loop, limit_bytes=limit_bytes)

    def to(self, worker: WorkerId) -> Outbox:
        """Where what is meant for a worker is posted."""
        return self._by_worker.get(worker) or self._by_worker[COORDINATOR]

    def aside(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Outbox]:
        """Further outboxes, in which as much as one likes may wait, on the links that reach some workers."""
        made = {}
        for worker in workers:
            link = self._links.get(worker, self._links[COORDINATOR])
            made[worker] = self._outbox(link, limit_bytes=sys.maxsize)
        self._aside += made.values()
        return made

    def fail(self, error: CoterieError) -> None:
        """Wake whoever waits for room, with `error`; what is queued still goes out."""
        for outbox in (*self._by_worker.values(), *self._aside):
            outbox.fail(error)

    def abandon(self, error: CoterieError) -> None:
        """The same, and what is queued is lost."""
        for outbox in (*self._by_worker.values(), *self._aside):
            outbox.abandon(error)
