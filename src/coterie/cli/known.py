"""`coterie devices`: the devices that have joined this user's runs."""

import argparse
import time
from typing import TYPE_CHECKING

from coterie.cli.formatting import aligned, print_json
from coterie.cli.parser import Parser
from coterie.errors import UsageError
from coterie.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from coterie.coordinator.device_list import DeviceList, KnownDevice


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "devices",
        help="list the devices that have joined your runs",
        description="List the devices that have joined runs of yours on this machine: what they can do, when they\n"
        "were last seen. `devices forget NAME` takes one off the list, `devices rename NAME NEW` calls it differently.",
    )
    parser.add_argument("action", nargs="?", choices=("list", "forget", "rename"), default="list", help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="which device: its name, or how its identity begins")
    parser.add_argument("new", nargs="?", metavar="NEW", help="of rename: what to call it")
    return parser


def run(args: argparse.Namespace) -> int:
    """List, forget or rename."""
    from coterie.coordinator.device_list import DeviceList  # noqa: PLC0415 - see cli.main

    wanted = {"list": 0, "forget": 1, "rename": 2}[args.action]
    given = sum(word is not None for word in (args.name, args.new))
    if given != wanted:
        raise UsageError(
            f"`devices {args.action}` takes {counted(wanted, 'name')}, and {given} came",
            hint="`coterie devices`, `coterie devices forget NAME` or `coterie devices rename NAME NEW`",
        )
    devices = DeviceList()
    if args.action == "list":
        _list(devices, as_json=args.json)
        return 0
    changed = devices.forget(args.name) if args.action == "forget" else devices.rename(args.name, args.new)
    if args.json:
        print_json({args.action: changed})
    elif args.action == "forget":
        print(f"{changed.title} ({changed.identity[:12]}…) is forgotten; it is listed again if it joins again")
    else:
        print(f"{changed.name} ({changed.identity[:12]}…) is called {changed.title} from now on")
    return 0


def _list(devices: "DeviceList", *, as_json: bool) -> None:
    found = devices.all()
    if as_json:
        print_json({"devices": found})
    elif not found:
        print("no device has joined yet: `coterie train recipe.toml --workers 2` prints how one does")
    else:
        heads = ("device", "identity", "last seen", "joined", "memory", "computes on", "speed")
        print(aligned([heads, *(_row(device, time.time()) for device in found)]))


def _row(device: "KnownDevice", now_s: float) -> tuple[str, ...]:
    name = f"{device.alias} ({device.name})" if device.alias else device.name
    speed = f"{device.flops_per_s / 1e9:.3g} GFLOP/s" if device.flops_per_s else "not measured"
    return (
        name,
        device.identity[:12],
        f"{format_seconds(max(now_s - device.last_seen_s, 1.0))} ago",
        counted(device.joined, "time"),
        format_bytes(device.memory_bytes),
        f"{device.device_type}, {counted(device.threads, 'thread')}",
        speed,
    )
