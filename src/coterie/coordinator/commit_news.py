"""Word of commits for the stages, in the background: whoever trains must not wait for a slow link."""

import asyncio
from collections.abc import Awaitable, Callable

from coterie.cluster.fault_messages import Committed
from coterie.cluster.message import Message
from coterie.errors import CoterieError
from coterie.logs import get_logger

log = get_logger(__name__)


class CommitNews:
    """One word is under way at a time; of those that come meanwhile only the newest is sent."""

    def __init__(self) -> None:
        self._due: tuple[Callable[[Message], Awaitable[None]], int] | None = None
        self._task: asyncio.Task[None] | None = None

    def post(self, tell: Callable[[Message], Awaitable[None]], step: int) -> None:
        """Tell stages that the state after `step` steps is whole; `tell` sends a message to all of them."""
        self._due = (tell, step)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        try:
            while self._due is not None:
                (tell, step), self._due = self._due, None
                try:
                    await tell(Committed(step=step))
                except CoterieError as error:
                    log.info("not every stage heard of the commit of step %d: %s", step, error.message)
        finally:
            self._task = None
