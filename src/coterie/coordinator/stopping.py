"""Ctrl-C and SIGTERM: once for a clean stop with a checkpoint, twice to stop at once."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class StopRequests:
    """Counts requests to stop. `on_first` may refuse to wait by returning False; then the run is cancelled at once."""

    def __init__(self) -> None:
        self._count = 0
        self.on_first: Callable[[], bool] = lambda: False
        self._task: asyncio.Task[object] | None = None

    @property
    def requested(self) -> bool:
        """Whether anybody asked."""
        return self._count > 0

    def request(self) -> None:
        """Ask to stop; from the event loop's thread."""
        self._count += 1
        waits = self.on_first() if self._count == 1 else False
        if not waits and self._task is not None:
            self._task.cancel()

    @contextlib.contextmanager
    def listening(self, task: "asyncio.Task[object]") -> Iterator[None]:
        """Turn the system's signals into requests while the block runs. Outside the main thread: none are taken."""
        self._task = task
        loop = asyncio.get_running_loop()
        names = ("SIGINT", "SIGTERM") if sys.platform != "win32" else ("SIGINT", "SIGBREAK")
        numbers = [signal.Signals[name] for name in names]
        previous: dict[signal.Signals, Handler] = {}

        def take(_number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.request)

        with contextlib.suppress(ValueError):  # not the main thread: its owner stops the run by `request`
            for number in numbers:
                previous[number] = signal.signal(number, take)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._task = None
