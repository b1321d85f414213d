"""Flags that describe devices and links which are not there."""

import argparse
import re
from typing import TYPE_CHECKING

from coterie.errors import UsageError
from coterie.units import parse_memory, parse_rate, parse_seconds

if TYPE_CHECKING:
    from coterie.profiles.hypothetical import EvenLinks, HypotheticalDevice

_KEYS = ("name", "memory", "speed", "watts", "network_watts")
_HINT = "write it like --device name=phone,memory=600MiB,speed=0.5"
_NAME = re.compile(r"[\w.-]+")


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """`--device`, `--link`, `--latency`."""
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="KEY=VALUE,…",
        help="a device to plan for instead of those that join: name, memory (600MiB; default: this machine's), "
        "speed (1 is one core of this machine), watts while it computes and network_watts while it sends or receives "
        "(10 and 1; for the energy of --compare). Repeatable",
    )
    parser.add_argument("--link", metavar="RATE", help="rate of every link between --device devices, such as 100Mbit/s")
    parser.add_argument("--latency", metavar="TIME", help="latency of these links, such as 5ms (default 1ms)")


def devices_from(args: argparse.Namespace) -> "tuple[HypotheticalDevice, ...]":
    """What `--device` says.

    Raises:
        UsageError: A device is described wrongly.
    """
    devices = tuple(_device(text, number) for number, text in enumerate(args.device, start=1))
    names = [device.name for device in devices]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two devices are named {twice[0]!r}", hint="give each --device a name of its own")
    return devices


def links_from(args: argparse.Namespace) -> "EvenLinks | None":
    """What `--link` and `--latency` say; None: nobody knows.

    Raises:
        UsageError: They are wrong, or stand without `--device`.
    """
    from coterie.profiles.hypothetical import EvenLinks  # noqa: PLC0415 - see cli.main

    if args.link is None and args.latency is None:
        return None
    if not args.device:
        raise UsageError(
            "--link and --latency describe links between --device devices", hint="add --device, or drop them"
        )
    if args.link is None:
        raise UsageError("--latency needs --link", hint="say how fast the links are, such as --link 100Mbit/s")
    try:
        return EvenLinks(bytes_per_s=parse_rate(args.link), latency_s=parse_seconds(args.latency or "1ms"))
    except ValueError as error:
        raise UsageError(str(error), hint="write --link 100Mbit/s --latency 5ms") from error


def _device(text: str, number: int) -> "HypotheticalDevice":
    from coterie.profiles.hypothetical import HypotheticalDevice  # noqa: PLC0415 - see cli.main
    from coterie.profiles.power import PowerModel  # noqa: PLC0415

    usual = PowerModel()
    pairs = dict(part.partition("=")[::2] for part in text.split(",") if part.strip())
    pairs = {key.strip(): value.strip() for key, value in pairs.items()}
    unknown = [key for key in pairs if key not in _KEYS]
    if unknown or not all(pairs.values()):
        raise UsageError(f"--device {text}: expected {', '.join(f'{key}=…' for key in _KEYS)}", hint=_HINT)
    name = pairs.get("name", f"device-{number}")
    if not _NAME.fullmatch(name):
        raise UsageError(f"--device {text}: a name has letters, digits, dots and dashes", hint=_HINT)
    try:
        memory = parse_memory(pairs["memory"]) if "memory" in pairs else None
        speed, watts, network_watts = (
            float(pairs.get(key, default))
            for key, default in (("speed", 1.0), ("watts", usual.compute_w), ("network_watts", usual.network_w))
        )
    except ValueError as error:
        raise UsageError(f"--device {text}: {error}", hint=_HINT) from error
    if not 0 < speed < float("inf") or memory == 0:
        raise UsageError(f"--device {text}: speed and memory must be above 0", hint=_HINT)
    if not all(0 <= value < float("inf") for value in (watts, network_watts)):
        raise UsageError(f"--device {text}: watts must be 0 or more", hint=_HINT)
    power = PowerModel(compute_w=watts, network_w=network_watts)
    return HypotheticalDevice(name=name, memory_bytes=memory, speed=speed, power=power)
