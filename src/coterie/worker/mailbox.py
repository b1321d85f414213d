"""Where the event loop puts what arrives and the compute thread waits for what it needs."""

import threading

from coterie.errors import CoterieError
from coterie.transport.frame import Frame

Key = tuple[str, int, int]
"""(frame kind, step, micro-batch): data of different micro-batches can never be paired."""


class Mailbox:
    """Frames by key, handed over between threads.

    How many wait here is bounded by the schedule and by the coordinator's window of fed batches, not by this class.
    """

    def __init__(self) -> None:
        self._frames: dict[Key, Frame] = {}
        self._changed = threading.Condition()
        self._error: CoterieError | None = None
        self._is_closed = False

    def put(self, key: Key, frame: Frame) -> None:
        """Store a frame. A second one under the same key is a duplicate after a recovery and is dropped."""
        with self._changed:
            if self._is_closed:
                return
            self._frames.setdefault(key, frame)
            self._changed.notify_all()

    def take(self, key: Key) -> Frame:
        """Wait for the frame under `key` and remove it.

        Raises:
            CoterieError: What `fail` was called with.
        """
        with self._changed:
            while key not in self._frames or self._is_closed:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._frames.pop(key)

    def fail(self, error: CoterieError) -> None:
        """Wake every waiter with `error`, now and later."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self, error: CoterieError) -> None:
        """Fail with `error`, and give nothing out any more: what is here belongs to a plan that is over."""
        with self._changed:
            self._is_closed = True
            self._frames.clear()
        self.fail(error)
