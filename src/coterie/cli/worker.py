"""`coterie worker`: lend this device to a run."""

import argparse
import os
import platform
from pathlib import Path

from coterie.cli.parser import Parser
from coterie.cli.worker_joining import add_joining, join_link_of
from coterie.cli.worker_terms import add_terms, battery_of, memory_file_of, terms_of, watts_of
from coterie.errors import UsageError
from coterie.local import PARENT_VARIABLE
from coterie.profiles.cache import cache_folder
from coterie.units import parse_memory
from coterie.worker.settings import WorkerSettings


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "worker",
        help="lend this device to a run",
        description="Join a run with the link that `coterie train` printed, and work for it until it is over.\n"
        "Without a link: look for a run that is announced in this network, and ask for its token.",
    )
    add_joining(parser)
    parser.add_argument("--wait", action="store_true", help="wait for the coordinator if it is not there yet")
    add_flags(parser)
    return parser


def add_flags(parser: Parser) -> None:
    """What the device's owner decides; `coterie service` takes the same."""
    parser.add_argument("--name", default=platform.node() or "device", help="what to call this device")
    parser.add_argument("--memory", metavar="SIZE", help="most memory the worker may use, such as 600MiB")
    parser.add_argument("--enforce-memory", action="store_true", help="make allocations beyond --memory fail")
    parser.add_argument("--speed", type=float, default=1.0, help="share of a core's speed to use, above 0 up to 1")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; default: the usable cores")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps", "xpu"), default="cpu", help="where to compute")
    parser.add_argument(
        "--backends",
        default="torch",
        metavar="NAMES",
        help="share each layer among compute backends: names with + or commas between, or auto for all (default torch)",
    )
    parser.add_argument(
        "--no-direct-links", action="store_true", help="open no port: send everything through the coordinator"
    )
    parser.add_argument(
        "--measure-again", action="store_true", help="measure this device anew, whatever earlier runs have kept"
    )
    parser.add_argument(
        "--identity",
        default="",
        metavar="FILE",
        help="the key by which runs know this device again; default: one in your settings folder, made at first use. "
        "memory: one that is gone with the worker",
    )
    parser.add_argument(
        "--shard-cache",
        metavar="FOLDER",
        help="where to keep frozen weights that were received, so that they are not fetched again; off: nowhere. "
        "Default: in your cache folder",
    )
    parser.add_argument("--shard-quota", default="20GiB", metavar="SIZE", help="most to keep there (default 20GiB)")
    parser.add_argument(
        "--role",
        choices=("device", "server"),
        default="device",
        help="device: run layers of the model (default). server: train the side network of a side-tuning run",
    )
    parser.add_argument(
        "--cache-folder",
        type=Path,
        metavar="FOLDER",
        help="of a server: where it keeps activations and its state, so that it may be killed; default: in memory",
    )
    add_terms(parser)


def run(args: argparse.Namespace) -> int:
    """Join and work."""
    settings = settings_from(args)
    join = join_link_of(args)
    import asyncio  # noqa: PLC0415 - see cli.main

    from coterie.worker.program import run_worker  # noqa: PLC0415 - imports torch: seconds

    asyncio.run(run_worker(join, settings, lambda line: print(line, flush=True)))
    return 0


def settings_from(args: argparse.Namespace) -> WorkerSettings:
    """What the flags say.

    Raises:
        UsageError: One of them is wrong.
    """
    return WorkerSettings(
        name=args.name,
        memory_bytes=_memory(args.memory),
        enforce_memory=args.enforce_memory,
        speed=_speed(args.speed),
        threads=_threads(args.threads),
        device_type=args.device,
        direct_links=not args.no_direct_links,
        measure_again=args.measure_again,
        backends=backend_names(args.backends),
        role=args.role,
        cache_folder=_cache_folder(args),
        parent=int(os.environ.pop(PARENT_VARIABLE, "0")),
        terms=terms_of(args),
        battery=battery_of(args),
        watts=watts_of(args),
        memory_file=memory_file_of(args),
        keep_awake=not args.no_keep_awake,
        shard_cache=_shard_cache(args.shard_cache),
        shard_quota=_size(args.shard_quota, "--shard-quota"),
        identity=args.identity,
        waits=getattr(args, "wait", False),
    )


def _cache_folder(args: argparse.Namespace) -> Path | None:
    folder: Path | None = args.cache_folder
    if folder is not None and args.role != "server":
        raise UsageError("--cache-folder is for a server", hint="add --role server, or leave it out")
    return folder


def _shard_cache(folder: str | None) -> Path | None:
    if folder == "off":
        return None
    return cache_folder() / "shards" if folder is None else Path(folder)


def _memory(text: str | None) -> int | None:
    return None if text is None else _size(text, "--memory")


def _size(text: str, flag: str) -> int:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}", hint="write a size such as 600MiB") from error


def backend_names(text: str) -> tuple[str, ...]:
    """Of `--backends`."""
    names = tuple(dict.fromkeys(name.strip() for name in text.replace("+", ",").split(",") if name.strip()))
    if not names:
        raise UsageError("--backends names none", hint="write --backends auto, or names such as torch,opencl")
    if "auto" in names and len(names) > 1:
        raise UsageError(f"--backends is {text}: auto means all of them", hint="leave auto or the names out")
    return names


def _speed(speed: float) -> float:
    if not 0 < speed <= 1:
        raise UsageError(f"--speed is {speed}; it must be above 0 and at most 1", hint="0.5 is half of a core's speed")
    return speed


def _threads(threads: int) -> int:
    if threads < 0:
        raise UsageError(f"--threads is {threads}", hint="give 1 or more; leave it out for all usable cores")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads or usable
