"""The ways from one stage to everybody: direct where there is a link, else through the coordinator."""

import asyncio
from collections.abc import Mapping

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
        loop = asyncio.get_running_loop()
        self._by_worker = {
            worker: Outbox(link, loop, limit_bytes=UNSENT_LIMIT_BYTES)
            for worker, link in {**direct, COORDINATOR: coordinator}.items()
        }

    def to(self, worker: WorkerId) -> Outbox:
        """Where what is meant for a worker is posted."""
        return self._by_worker.get(worker) or self._by_worker[COORDINATOR]

    def fail(self, error: CoterieError) -> None:
        """Wake whoever waits for room, with `error`; what is queued still goes out."""
        for outbox in self._by_worker.values():
            outbox.fail(error)

    def abandon(self, error: CoterieError) -> None:
        """The same, and what is queued is lost."""
        for outbox in self._by_worker.values():
            outbox.abandon(error)
