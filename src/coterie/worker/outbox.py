"""How the compute thread sends without waiting for the network, until too much is unsent."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future

from coterie.errors import CoterieError
from coterie.transport.frame import Frame
from coterie.transport.stream_link import StreamLink


class Outbox:
    """Frames from the compute thread to one link, sent by a task of the event loop in order.

    `post` blocks while `limit_bytes` are unsent: a slow link slows its stage down instead of filling the memory.
    """

    def __init__(self, link: StreamLink, loop: asyncio.AbstractEventLoop, *, limit_bytes: int) -> None:
        self._link = link
        self._loop = loop
        self._limit_bytes = limit_bytes
        self._unsent_bytes = 0
        self._room = threading.Condition()
        self._error: CoterieError | None = None
        self._queue: asyncio.Queue[Frame] = asyncio.Queue()
        self._abandoned = asyncio.Event()
        self._task = loop.create_task(self._send_all())

    def post(self, frame: Frame) -> None:
        """Queue a frame; called from the compute thread.

        Raises:
            CoterieError: The link broke.
        """
        size = frame.payload_bytes
        with self._room:
            # One frame larger than the limit passes alone.
            while self._error is None and self._unsent_bytes and self._unsent_bytes + size > self._limit_bytes:
                self._room.wait()
            if self._error is not None:
                raise self._error
            self._unsent_bytes += size
        self._loop.call_soon_threadsafe(self._queue.put_nowait, frame)

    def fail(self, error: CoterieError) -> None:
        """Wake the compute thread with `error`, now and later."""
        with self._room:
            self._error = self._error or error
            self._room.notify_all()

    def wait_until_sent(self) -> None:
        """Wait, in the compute thread, until no buffer posted so far is needed any more.

        Raises:
            CoterieError: The link broke.
        """
        asyncio.run_coroutine_threadsafe(self.drain(), self._loop).result()
        if self._error is not None:
            raise self._error

    def begin_drain(self) -> "Future[None]":
        """Done when all that was posted so far is with the link, or never will be; asked for by the compute thread."""
        return asyncio.run_coroutine_threadsafe(self._until(self._queue.join()), self._loop)

    async def drain(self) -> None:
        """The same as `wait_until_sent` from the event loop."""
        await self._until(self._all_sent())

    async def _until(self, work: "Coroutine[None, None, None]") -> None:
        sent, abandoned = self._loop.create_task(work), self._loop.create_task(self._is_abandoned())
        try:
            await asyncio.wait({sent, abandoned}, return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                sent.result()
        finally:
            sent.cancel()
            abandoned.cancel()

    async def _all_sent(self) -> None:
        await self._queue.join()
        await self._link.flush()

    async def _is_abandoned(self) -> None:
        await self._abandoned.wait()

    def cancel(self) -> None:
        """Stop sending; what is queued is lost."""
        self._abandoned.set()
        self._task.cancel()

    def abandon(self, error: CoterieError) -> None:
        """Fail with `error` and stop sending, from the event loop; the link itself stays as it is."""
        self.fail(error)
        self.cancel()

    async def _send_all(self) -> None:
        while True:
            frame = await self._queue.get()
            try:
                await self._link.send(frame)
            except CoterieError as error:
                self.fail(error)
            finally:
                self._queue.task_done()
                with self._room:
                    self._unsent_bytes -= frame.payload_bytes
                    self._room.notify_all()
