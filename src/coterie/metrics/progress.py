"""Progress while a run trains: a live display in a terminal, plain lines anywhere else."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from coterie.clock import Clock, SystemClock
from coterie.metrics.fault_records import MembershipRecord, RebalanceRecord, RecoveryRecord
from coterie.metrics.records import (
    AnyRecord,
    EvaluationRecord,
    FaultRecord,
    MemoryRecord,
    PlanRecord,
    StartRecord,
    StepRecord,
)
from coterie.units import format_bytes, format_seconds, name_units

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

_SMOOTHING = 0.2
"""Weight of the newest step in running means: about the last ten steps count."""

_BAR_CELLS = 10
_HEAD_CELLS = 16
_WIDE_CELLS = 100


class DeviceLine:
    """What the display knows of one device."""

    def __init__(self, worker: str, name: str, limit_bytes: int, units: str) -> None:
        self.worker = worker
        self.name = name
        self.limit_bytes = limit_bytes
        self.units = units
        self.memory_bytes = 0
        """The highest so far: what a limit has to hold."""
        self.utilization = 0.0
        self.backends: dict[str, float] = {}
        """Busy part of each compute backend, where layers are shared among them."""

    @property
    def busy_text(self) -> str:
        """How busy the device is, and each of its backends."""
        backends = ", ".join(f"{name} {busy:.0%}" for name, busy in self.backends.items())
        return f"{self.utilization:.0%}" + (f" ({backends})" if backends else "")

    @property
    def memory_text(self) -> str:
        """Most memory used so far and, if there is one, the limit."""
        used = format_bytes(self.memory_bytes)
        return f"{used} / {format_bytes(self.limit_bytes)}" if self.limit_bytes else used

    @property
    def fullness(self) -> float:
        """Used part of the limit, 0 to 1; 0 without one."""
        return min(self.memory_bytes / self.limit_bytes, 1.0) if self.limit_bytes else 0.0


class RunState:
    """Running figures of a run, from its records; knows nothing of terminals."""

    def __init__(self, total_steps: int, devices: tuple[DeviceLine, ...]) -> None:
        self.total_steps = total_steps
        self.devices = {device.worker: device for device in devices}
        self.steps_done = 0
        self.epoch = 0
        self.loss: float | None = None
        self.tokens_per_s = 0.0
        self._step_s = 0.0

    def take(self, record: AnyRecord) -> None:
        """Update the figures."""
        match record:
            case StartRecord():
                self.total_steps = record.total_steps
                self.steps_done = record.first_step
                self.epoch = min(record.first_step, max(record.total_steps - 1, 0)) // max(record.steps_per_epoch, 1)
            case StepRecord():
                self._take_step(record)
            case PlanRecord() if record.version > 1:
                self._take_plan(record)
            case MemoryRecord() if record.worker in self.devices:
                self.devices[record.worker].memory_bytes = max(record.memory_bytes, record.peak_bytes)
                self.devices[record.worker].limit_bytes = record.limit_bytes
            case _:
                return

    def _take_plan(self, plan: PlanRecord) -> None:
        """Layers have moved: these devices work now, and those that the plan does not use are shown no more."""
        before, self.devices = self.devices, {}
        for stage in plan.stages:
            line = before.get(stage.worker) or DeviceLine(stage.worker, stage.device_name, stage.memory_limit, "")
            line.units = name_units(stage.first_unit, stage.stop_unit, plan.units)
            line.limit_bytes = stage.memory_limit
            self.devices[stage.worker] = line

    def _take_step(self, record: StepRecord) -> None:
        self.steps_done = record.step + 1
        self.epoch = record.epoch
        self.loss = record.loss
        rate = record.tokens / record.seconds if record.seconds > 0 else 0.0
        fresh = self._step_s == 0.0
        self.tokens_per_s = rate if fresh else self.tokens_per_s + _SMOOTHING * (rate - self.tokens_per_s)
        self._step_s = record.seconds if fresh else self._step_s + _SMOOTHING * (record.seconds - self._step_s)
        for worker in record.workers:
            # A side-tuning run's server is in no plan, and first seen here.
            device = self.devices.setdefault(worker.worker, DeviceLine(worker.worker, worker.worker, 0, "server"))
            device.memory_bytes = max(worker.memory_bytes, worker.peak_bytes)
            change = worker.utilization - device.utilization
            device.utilization = worker.utilization if fresh else device.utilization + _SMOOTHING * change
            device.backends = {
                name: busy + (1 - _SMOOTHING) * (device.backends.get(name, busy) - busy)
                for name, busy in worker.backends.items()
            }

    @property
    def eta_text(self) -> str:
        """How long it still takes; nobody knows before the first step, also that of a resumed run."""
        return f"{format_seconds(self.eta_s)} left" if self._step_s else "starting"

    @property
    def step_s(self) -> float:
        """Running mean of the seconds of a step; 0 before the first one."""
        return self._step_s

    @property
    def eta_s(self) -> float:
        """Seconds that the remaining steps will take at the present rate."""
        return self._step_s * max(self.total_steps - self.steps_done, 0)

    @property
    def line(self) -> str:
        """One plain line with everything."""
        loss = "–" if self.loss is None else f"{self.loss:.4f}"
        parts = [
            f"step {self.steps_done}/{self.total_steps}",
            f"epoch {self.epoch + 1}",
            f"loss {loss}",
            f"{self.tokens_per_s:,.0f} tokens/s",
            self.eta_text,
        ]
        devices = [f"{d.name} {d.busy_text} {d.memory_text}" for d in self.devices.values()]
        return "  ".join(parts) + (" | " + " | ".join(devices) if devices else "")


class ProgressDisplay:
    """A sink that shows the run. Use it as a context manager, so that the terminal is always given back.

    In a terminal a block of lines at the bottom is redrawn four times a second; whatever is printed meanwhile appears
    above it. Elsewhere (a pipe, CI) one line is printed every `plain_interval_s` seconds and at the end of an epoch.
    """

    def __init__(
        self,
        total_steps: int,
        devices: tuple[DeviceLine, ...] = (),
        *,
        stream: TextIO | None = None,
        clock: Clock | None = None,
        plain_interval_s: float = 10.0,
    ) -> None:
        self.state = RunState(total_steps, devices)
        self._stream = stream or sys.stdout
        self._clock = clock or SystemClock()
        self._plain_interval_s = plain_interval_s
        self._last_line_s = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._live = _start_live(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: AnyRecord) -> None:
        """Show what a record says."""
        self.state.take(record)
        match record:
            case EvaluationRecord():
                self.print(evaluation_line(record))
            case FaultRecord(worker=worker) if worker:
                # A fault without a worker ends the run; whoever called says so, once.
                named = record.message.startswith(worker)
                self.print(record.message if named else f"{worker}: {record.message}")
            case MembershipRecord(change="lost"):
                return  # the fault has said why
            case RebalanceRecord(worth=False, cause="drift"):
                return  # noticed again and again on a busy machine; the event log has it
            case MembershipRecord() | RecoveryRecord() | RebalanceRecord():
                self.print(record.line)
            case StepRecord() if self._live is None:
                self._plain_step()
            case _:
                return

    def print(self, text: str) -> None:
        """Print a line above the display."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def _plain_step(self) -> None:
        now = self._clock.now()
        last = self.state.steps_done >= self.state.total_steps
        if last or now - self._last_line_s >= self._plain_interval_s:
            self._last_line_s = now
            self.print(self.state.line)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def evaluation_line(record: EvaluationRecord) -> str:
    """An evaluation in one line."""
    metrics = "  ".join(f"{name} {record.text_of(name)}" for name in record.metrics)
    loss = "" if record.loss is None else f"  loss {record.loss:.4f}"
    return f"{record.split} after epoch {record.epoch}: {metrics}{loss}  ({format_seconds(record.seconds)})"


def _start_live(display: ProgressDisplay) -> "Live":
    from rich.console import Console  # noqa: PLC0415 - rich loads only where something is displayed
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=display._stream)  # noqa: SLF001 - one class in two parts
    live = Live(
        console=console,
        get_renderable=lambda: _render(display.state, console.width),
        refresh_per_second=4,
        transient=False,
    )
    live.start(refresh=True)
    return live


def _render(state: RunState, width: int) -> "Table":
    """Two grids for a terminal of `width` cells. Nothing wraps: a line that breaks in two makes the display jump."""
    from rich.progress_bar import ProgressBar  # noqa: PLC0415 - see _start_live
    from rich.table import Table  # noqa: PLC0415

    loss = "–" if state.loss is None else f"{state.loss:.4f}"
    head = Table.grid(padding=(0, 2))
    for cells in (None, _HEAD_CELLS, None, None, None, None):
        head.add_column(no_wrap=True, width=cells)
    head.add_row(
        f"[bold]epoch {state.epoch + 1}[/]",
        ProgressBar(total=max(state.total_steps, 1), completed=state.steps_done, width=_HEAD_CELLS),
        f"{state.steps_done}/{state.total_steps}",
        f"loss [bold]{loss}[/]",
        f"{state.tokens_per_s:,.0f} tokens/s",
        state.eta_text,
    )
    table = Table.grid(padding=(0, 1))
    for cells in (None, None, _BAR_CELLS, None, _BAR_CELLS, None):
        table.add_column(no_wrap=True, width=cells)
    for device in state.devices.values():
        table.add_row(
            f" {device.name}",
            f"[dim]{device.units}[/]" if width >= _WIDE_CELLS else "",
            ProgressBar(total=1.0, completed=device.utilization, width=_BAR_CELLS),
            f"{device.utilization:4.0%} busy{_backends(device)} ",
            _memory_bar(device),
            device.memory_text,
        )
    block = Table.grid()
    block.add_row(head)
    block.add_row(table)
    return block


def _backends(device: DeviceLine) -> str:
    return "".join(f" {name} {busy:.0%}" for name, busy in device.backends.items())


def _memory_bar(device: DeviceLine) -> "ProgressBar":
    from rich.progress_bar import ProgressBar  # noqa: PLC0415 - see _start_live

    style = "red" if device.fullness > 0.95 else "cyan"
    return ProgressBar(
        total=1.0, completed=device.fullness, width=_BAR_CELLS, complete_style=style, finished_style=style
    )
