"""A run as the terminal shows it: the join link, notices, the plan, live progress, the summary."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from coterie.metrics.progress import DeviceLine, ProgressDisplay
from coterie.metrics.records import AnyRecord
from coterie.metrics.rows_display import RowsDisplay
from coterie.units import counted, format_seconds, name_units

if TYPE_CHECKING:
    from coterie.planner.plan import Plan


class ConsoleObserver:
    """A `RunObserver` that prints. Under `--json` everything but the result goes to the standard error.

    Args:
        as_json: Whether the result is JSON.
        qr: Whether to show the join link as a QR code too; None: if the output is a terminal. Never under `--json`.
    """

    def __init__(self, *, as_json: bool, qr: bool | None = None) -> None:
        self._stream = sys.stderr if as_json else sys.stdout
        self._shows_qr = not as_json and (self._stream.isatty() if qr is None else qr)
        self._display: ProgressDisplay | None = None

    def joinable(self, join_link: str) -> None:
        """Show how others join."""
        self.notice("on each further device, run (the link is a secret):")
        self.notice(f"  coterie worker '{join_link}'")
        if self._shows_qr:
            from coterie.cli.qr_code import qr_text  # noqa: PLC0415 - only now a code is shown

            self.notice(qr_text(join_link, self._stream))

    def notice(self, text: str) -> None:
        """Print a line, above the live display if there is one."""
        if self._display is not None:
            self._display.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def planned(self, plan: "Plan", explanation: str, steps: int) -> None:
        """Print the plan and begin the live display."""
        self.notice("")
        self.notice(explanation)
        # Of a side-tuning run the plan says how long devices take for a batch; most steps are the server's alone.
        takes = "" if plan.schedule == "forward" else f", about {format_seconds(plan.predicted_step_s * steps)}"
        self.notice(f"{counted(steps, 'step')}{takes}\n")
        devices = tuple(
            DeviceLine(
                stage.worker,
                stage.device_name,
                stage.memory_limit,
                name_units(stage.first_unit, stage.stop_unit, plan.units),
            )
            for stage in plan.stages
        )
        self._display = ProgressDisplay(steps, devices, stream=self._stream)
        self._display.__enter__()

    def record(self, record: AnyRecord) -> None:
        """Show it in the live display."""
        if self._display is not None:
            self._display.write(record)

    def advanced(self, what: str, done: int, total: int) -> None:
        """Nothing: a run that trains has its own display."""

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        if self._display is not None:
            self._display.close()
            self._display = None


class PlainConsole(ConsoleObserver):
    """For verbs that do not train: no display of a run, but in a terminal a bar of the rows that are done.

    The bar goes to the standard error. Use it as a context manager then, so that the terminal is always given back.
    """

    def __init__(self, *, as_json: bool, shows_progress: bool = False) -> None:
        super().__init__(as_json=as_json, qr=False)
        self._said: set[str] = set()
        self._rows = RowsDisplay(sys.stderr) if shows_progress and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def notice(self, text: str) -> None:
        """Print a line, above the bar if there is one; once, where a verb looks at one model and data twice."""
        if text in self._said:
            return
        self._said |= {text} if text else set()
        if self._rows is not None:
            self._rows.hide()
        super().notice(text)

    def advanced(self, what: str, done: int, total: int) -> None:
        """Show it in the bar."""
        if self._rows is not None:
            self._rows.show(what, done, total)

    def close(self) -> None:
        """Take the bar away. Idempotent."""
        if self._rows is not None:
            self._rows.hide()

    def planned(self, plan: "Plan", explanation: str, steps: int) -> None:  # noqa: ARG002 - the observer's signature
        """Print the plan."""
        self.notice("")
        self.notice(f"{explanation}\n")
