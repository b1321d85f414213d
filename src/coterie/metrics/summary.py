"""The end of a run for people: tables of devices, speed, links and quality, and the same in one line."""

import sys
from typing import TYPE_CHECKING, TextIO

from coterie.metrics.records import DeviceSummary, SideFigures, SummaryRecord
from coterie.units import counted, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 110

_FAR_OFF = 2.0
"""Predicted over measured seconds of a step, or the reverse, from which on the user is told."""

_ENERGY_SOURCES = {
    "rapl": "measured: processor",
    "battery": "measured: whole device",
    "simulated": "of a simulated battery",
    "model": "assumed: stated watts times busy time",
}

_AGAINST = "against one\ndevice, whole\nbatch (predicted)"


def print_summary(summary: SummaryRecord, *, stream: TextIO | None = None) -> None:
    """Print all tables of `summary`; `summary_line` is the sentence to put below them."""
    from rich.console import Console  # noqa: PLC0415 - rich loads only where something is displayed

    target = stream or sys.stdout
    console = Console(file=target, width=None if target.isatty() else _WIDTH, highlight=False)
    console.print(_devices(summary))
    console.print(_speed(summary) if summary.side is None else _side(summary, summary.side))
    if note := speed_note(summary):
        console.print(note, markup=False)
    for line in (*backend_lines(summary), *change_lines(summary)):
        console.print(line, markup=False)
    if line := energy_line(summary):
        console.print(line, markup=False)
    if summary.links:
        console.print(_links(summary))
    if summary.quality:
        console.print(_quality(summary))
    for name, count in summary.counts.items():
        console.print(f"{name}: {count:,}", markup=False)


def summary_line(summary: SummaryRecord) -> str:
    """The run in one line."""
    loss = f"loss {_loss(summary.first_loss)} → {_loss(summary.last_loss)}"
    quality = "".join(f", {record.split} {record.main_text}" for record in summary.quality)
    fullest = max((device.measured_peak_bytes for device in summary.devices), default=0)
    output = f", model in {summary.output}" if summary.output else ""
    done = f"{summary.steps:,} {'step' if summary.steps == 1 else 'steps'}{_resumed(summary)}"
    peak = summary.one_device_peak_bytes
    alone = f" (one device alone {format_bytes(peak)})" if peak else ""
    return (
        f"{done} on {counted(len(summary.devices), 'device')} in {format_seconds(summary.seconds)}: "
        f"{loss}{quality}, fullest device {format_bytes(fullest)}{alone}{output}"
    )


def speed_note(summary: SummaryRecord) -> str:
    """That steps took far longer or shorter than predicted, with what to do; empty if they did not.

    A single step says nothing: it also waits for caches and page faults.
    """
    if summary.steps < 2 or not summary.predicted_step_s or not summary.measured_step_s:
        return ""
    ratio = summary.measured_step_s / summary.predicted_step_s
    if 1 / _FAR_OFF <= ratio <= _FAR_OFF:
        return ""
    return (
        f"steps took {ratio:.2g} times as long as predicted: a device is busy now, or was when it was measured; "
        "--measure-again takes its speed anew"
    )


def backend_lines(summary: SummaryRecord) -> list[str]:
    """How busy each compute backend was on devices that share layers among them, and which ones failed."""
    lines = []
    for device in summary.devices:
        if device.backends:
            busy = ", ".join(f"{name} {part:.0%}" for name, part in device.backends.items())
            lines.append(f"{device.device_name}: backends busy: {busy}")
        for name, reason in device.backends_left_out.items():
            lines.append(f"{device.device_name}: the backend {name} was left out during the run: {reason}")
    return lines


def energy_line(summary: SummaryRecord) -> str:
    """What each device has drawn since it joined, and whether that was measured; empty if nobody knows."""
    told = []
    for record in summary.energy:
        sources = record.source.split("+") if record.source else []
        if sources:
            words = [_ENERGY_SOURCES.get(source, source) for source in sources]
            charge = "" if record.battery is None else f", battery at {record.battery:.0%}"
            told.append(f"{record.device_name} {format_joules(record.joules)} ({' and '.join(words)}{charge})")
    return f"energy: {'; '.join(told)}" if told else ""


def change_lines(summary: SummaryRecord) -> list[str]:
    """What became of devices that were lost, and which layers were moved and why."""
    moved = [record.line for record in summary.rebalances if record.worth]
    return [record.line for record in summary.recoveries] + moved


def _resumed(summary: SummaryRecord) -> str:
    """Which steps these were, if the run was resumed."""
    first = summary.first_step
    if not first:
        return ""
    last = first + summary.steps
    which = f"{last}" if summary.steps == 1 else f"{first + 1}-{last}"
    return f" ({which}, resumed after step {first})"


def _devices(summary: SummaryRecord) -> "Table":
    table = _table("Memory: peak of each worker process", ["device", "holds"])
    for heading in ("predicted", "measured", "off by", "limit", _AGAINST, "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in summary.devices:
        table.add_row(
            device.device_name,
            device.units,
            format_bytes(device.predicted_peak_bytes) if device.predicted_peak_bytes else "–",
            format_bytes(device.measured_peak_bytes),
            _difference(device),
            format_bytes(device.limit_bytes) if device.limit_bytes else "–",
            _change(device.measured_peak_bytes, summary.one_device_peak_bytes),
            f"{device.utilization:.0%}",
        )
    if summary.one_device_peak_bytes:
        table.add_section()
        one = format_bytes(summary.one_device_peak_bytes)
        table.add_row("one device", "everything, whole batch", one, "", "", "", "", "", style="dim")
    return table


def _speed(summary: SummaryRecord) -> "Table":
    table = _table("Speed", ["", "seconds per step", "tokens per second"])
    rate = summary.tokens / summary.seconds if summary.seconds > 0 else 0.0
    table.add_row("predicted", format_seconds(summary.predicted_step_s), "")
    table.add_row("measured", format_seconds(summary.measured_step_s), f"{rate:,.0f}")
    table.add_row("fastest device alone, predicted", format_seconds(summary.one_device_step_s), "", style="dim")
    return table


def _side(summary: SummaryRecord, side: SideFigures) -> "Table":
    """What devices did and sent once, and what the server then did alone."""
    table = _table("Side-tuning", ["", ""])
    done = f"{side.device_passes:.2f}".rstrip("0").rstrip(".")
    rows = {
        "devices ran over the data": f"{done} times, {format_seconds(side.device_cpu_s)} of CPU time",
        "everything was collected after": format_seconds(side.collect_s),
        "a step of the server": format_seconds(summary.measured_step_s),
        "sent to the server": f"{format_bytes(side.taps_bytes)} ({format_bytes(side.wire_bytes)} with headers)",
        "the server's cache": format_bytes(side.cache_bytes),
        "fetched at the end": format_bytes(side.fetched_bytes),
    }
    for what, figure in rows.items():
        table.add_row(what, figure)
    return table


def _links(summary: SummaryRecord) -> "Table":
    table = _table("Links: bytes sent", ["from", "to", "path", "carries"])
    for heading in ("forward", "backward", "per step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for link in summary.links:
        both = link.forward_bytes + link.backward_bytes
        table.add_row(
            link.source,
            link.target,
            link.path,
            link.codec,
            format_bytes(link.forward_bytes),
            format_bytes(link.backward_bytes),
            format_bytes(both / summary.steps) if summary.steps else "–",
        )
    return table


def _quality(summary: SummaryRecord) -> "Table":
    names = list(dict.fromkeys(name for record in summary.quality for name in record.metrics))
    table = _table("Quality", ["data"])
    for name in [*names, "loss"]:
        table.add_column(name, justify="right", no_wrap=True)
    for record in summary.quality:
        values = [record.text_of(name) if name in record.metrics else "–" for name in names]
        table.add_row(f"{record.split}, after epoch {record.epoch}", *values, _loss(record.loss))
    return table


def _table(title: str, text_columns: list[str]) -> "Table":
    from rich import box  # noqa: PLC0415 - see print_summary
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in text_columns:
        table.add_column(heading, overflow="fold")
    return table


def _difference(device: DeviceSummary) -> str:
    """How far the measured peak lies from the predicted one."""
    return _change(device.measured_peak_bytes, device.predicted_peak_bytes)


def _change(value: float, base: float) -> str:
    return f"{value / base - 1:+.0%}" if base and value else "–"


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
