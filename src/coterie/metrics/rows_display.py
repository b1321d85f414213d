"""A bar of the rows that are done, for runs in which nothing is trained."""

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class RowsDisplay:
    """One line at the bottom of a terminal: what is done, how many rows of how many, how long it still takes."""

    def __init__(self, stream: TextIO, *, noun: str = "rows") -> None:
        self._stream = stream
        self._noun = noun
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, done: int, total: int) -> None:
        """So many of `total` rows are `predicted`, or `answered`."""
        if self._progress is None:
            self._progress = _start(self._stream, self._noun)
        if what not in self._tasks:
            for task in self._tasks.values():
                self._progress.update(task, visible=False)
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)

    def hide(self) -> None:
        """Take the line away and give the terminal back; `show` brings a new one. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._tasks = None, {}


def _start(stream: TextIO, noun: str) -> "Progress":
    from rich.console import Console  # noqa: PLC0415 - rich loads only where something is displayed
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    progress = Progress(
        MofNCompleteColumn(),
        TextColumn(f"{noun} {{task.description}}"),
        BarColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=Console(file=stream),
        transient=True,
    )
    progress.start()
    return progress
