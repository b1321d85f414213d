"""`coterie status`: how a run does, device by device."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from coterie.cli.formatting import aligned, print_json
from coterie.cli.parser import Parser
from coterie.cli.which_run import add_run_flags, control_from
from coterie.units import format_bytes, format_seconds, name_units

if TYPE_CHECKING:
    from coterie.coordinator.run_control import RunControl
    from coterie.metrics.status import DeviceStatus, RunStatus

WATCH_S = 2.0

_SOURCES = {"model": "assumed"}
"""Where a power draw comes from, in the words of the summary, if they are others than in the records."""


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "status",
        help="show how a run does",
        description="Show how a run does: steps, loss, speed, time left, and each device's layers, work, memory, power "
        "and link.\nOf a run that has ended: how it ended.",
    )
    add_run_flags(parser)
    parser.add_argument("--watch", action="store_true", help="show it anew every two seconds until the run has ended")
    parser.add_argument(
        "--show-link",
        action="store_true",
        help="print the link by which another machine can see, pause and stop this run; it is a secret",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask and show."""
    control = control_from(args)
    if args.show_link:
        link = control.link()
        print_json({"control_link": link}) if args.json else print(link)
        return 0
    if args.watch:
        _watch(control, as_json=args.json)
        return 0
    status = control.status()
    print_json(status) if args.json else print(status_text(status) + _advice(control, status))
    return 0


def _advice(control: "RunControl", status: "RunStatus") -> str:
    """How a run goes on that has ended before its last step, if it is one of this machine."""
    if control.folder is None or not status.has_ended:
        return ""
    from coterie.coordinator.run_control import next_step  # noqa: PLC0415 - see cli.main

    advice = next_step(status, control.folder)
    return f"\n\n{advice}" if advice else ""


def status_text(status: "RunStatus") -> str:
    """A run for people: what it is, how far it is, its devices, and what was last said of it."""
    rows = [("device", "stage", "holds", "busy", "memory", "power", "link to the next")]
    for device in status.devices:
        is_placed = device.stage is not None
        holds = name_units(device.first_unit, device.stop_unit, status.units) if is_placed else ""
        rows.append(
            (
                device.name,
                str(device.stage) if is_placed else "–",
                holds or ("no layers" if status.units else ""),
                "" if device.utilization is None else f"{device.utilization:.0%}",
                _memory(device),
                _power(device),
                device.link,
            )
        )
    table = [f"\n{aligned(rows)}"] if status.devices else []
    words = _last_words(status)
    last = ["", *words] if words else []
    return "\n".join([_headline(status), _figures(status), *table, *last])


def _headline(status: "RunStatus") -> str:
    what = "  ".join(part for part in (status.run, status.model, status.schedule) if part)
    return f"{status.phase}: {what or status.output}"


def _figures(status: "RunStatus") -> str:
    if not status.total_steps:
        return "no step yet"
    parts = [f"step {status.step}/{status.total_steps}", f"epoch {status.epoch + 1}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.seconds_per_step is not None:
        parts += [f"{format_seconds(status.seconds_per_step)} a step", f"{status.tokens_per_s:,.0f} tokens/s"]
    if status.eta_s is not None and not status.has_ended:
        parts.append(f"{format_seconds(status.eta_s)} left")
    return "  ".join(parts)


def _last_words(status: "RunStatus") -> tuple[str, ...]:
    """What it is doing now, or what has lately become of its devices, and what it ended with."""
    if status.phase == "preparing":
        return (status.news,) if status.news else ()
    ended = (status.fault,) if status.phase == "failed" and status.fault else ()
    return (*(f"lately: {line}" for line in status.changes), *ended)


def _memory(device: "DeviceStatus") -> str:
    if device.memory_bytes is None:
        return ""
    limit = f" / {format_bytes(device.limit_bytes)}" if device.limit_bytes else ""
    return format_bytes(device.memory_bytes) + limit


def _power(device: "DeviceStatus") -> str:
    parts = []
    if device.battery is not None:
        parts.append(f"battery {device.battery:.0%}")
    if device.on_power is not None:
        parts.append("plugged in" if device.on_power else "on battery")
    source = device.watts_source
    if device.watts is not None:
        parts.append(f"{device.watts:.1f} W ({_SOURCES.get(source, source)})" if source else f"{device.watts:.1f} W")
    if device.celsius is not None:
        parts.append(f"{device.celsius:.0f} °C")
    return ", ".join(parts)


def _watch(control: "RunControl", *, as_json: bool) -> None:
    """Until the run has ended, or Ctrl-C: to stop watching is no failure."""
    try:
        if as_json or not sys.stdout.isatty():
            _print_again_and_again(control, as_json=as_json)
        else:
            _redraw(control)
    except KeyboardInterrupt:
        return


def _print_again_and_again(control: "RunControl", *, as_json: bool) -> None:
    while True:
        status = control.status()
        print_json(status) if as_json else print(f"{status_text(status)}{_advice(control, status)}\n")
        sys.stdout.flush()
        if status.has_ended:
            return
        time.sleep(WATCH_S)


def _redraw(control: "RunControl") -> None:
    from rich.console import Console  # noqa: PLC0415 - rich loads only where something is displayed
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            status = control.status()
            live.update(
                Text(status_text(status) + _advice(control, status), no_wrap=True, overflow="ellipsis"), refresh=True
            )
            if status.has_ended:
                return
            time.sleep(WATCH_S)
