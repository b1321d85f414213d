"""`coterie service`: a worker that starts with the machine, kept by the system's own means."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from coterie.cli.formatting import print_json
from coterie.cli.parser import Parser
from coterie.cli.worker import add_flags, settings_from
from coterie.errors import StorageError, UsageError
from coterie.transport.user_settings import IDENTITY_VARIABLE, IN_MEMORY, config_folder
from coterie.worker.service_files import (
    LABEL,
    NAME,
    ServiceSystem,
    WorkerService,
    launchd_plist,
    systemd_unit,
    windows_task,
)

LINK_FILE = "worker.link"
LOG_FILE = "worker.log"

_OF_PLATFORM: dict[str, ServiceSystem] = {"linux": "systemd", "darwin": "launchd", "win32": "windows"}
_VARIABLES = ("COTERIE_CONFIG", "COTERIE_CACHE", IDENTITY_VARIABLE)
"""What a worker looks for in its environment: folders and files. No secrets: a join token is not among them."""
_PATHS = ("FILE", "FOLDER")
"""What flags call a value that names a file or a folder, which may be told from where one is."""
_NO_PATHS = (IN_MEMORY, "off")
_NO_FLAGS = ("help", "action", "link", "system", "json", "verbose")


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    parser: Parser = verbs.add_parser(
        "service",
        help="let a worker start with this machine",
        description="Let a worker start with this machine and join whenever its coordinator is there. `install`\n"
        "writes the file for systemd, launchd or the Windows task scheduler and says how to switch it on, `show`\n"
        "prints it (before that: what would be written), `remove` deletes it. Flags of `coterie worker` say on which\n"
        "terms.",
    )
    parser.add_argument("action", choices=("install", "remove", "show"), help="what to do")
    parser.add_argument(
        "link", nargs="?", metavar="LINK", help="of install: the join link; kept in a file of yours only"
    )
    parser.add_argument(
        "--system", choices=("systemd", "launchd", "windows"), help="for which system; default: this one"
    )
    add_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write, delete or print the file."""
    system = _system(args.system)
    settings_from(args)  # a wrong flag should be told now, not by a service that does not start
    folder = config_folder().absolute()
    service = WorkerService(
        python=sys.executable,
        flags=_flags(args),
        link_file=str(folder / LINK_FILE),
        log_file=str(folder / LOG_FILE),
        environment=_environment(os.environ),
    )
    if args.action == "install":
        return _install(args, system, service)
    if args.link is not None:
        raise UsageError(f"`service {args.action}` takes no link", hint="leave it out")
    if args.action == "remove":
        return _remove(system, as_json=args.json)
    _show(system, service, as_json=args.json)
    return 0


def _show(system: ServiceSystem, service: WorkerService, *, as_json: bool) -> None:
    """The file that is installed; where there is none, or flags are given, the one that `install` would write."""
    path = _path(system)
    is_installed = not service.flags and path.exists()
    try:
        text = path.read_text(_encoding(system)) if is_installed else _text(system, service)
    except (OSError, UnicodeError) as error:
        raise StorageError(f"cannot read {path}: {error}", hint="install the service anew") from error
    if as_json:
        print_json({"system": system, "path": str(path), "installed": is_installed, "text": text})
        return
    what = f"installed: {path}" if is_installed else "what `install` would write, with a link and these flags:"
    print(what, file=sys.stderr, flush=True)
    print(text, end="")


def _install(args: argparse.Namespace, system: ServiceSystem, service: WorkerService) -> int:
    from coterie.transport.join_link import JoinLink  # noqa: PLC0415 - loads cryptography
    from coterie.transport.private_files import make_private_folder, write_private  # noqa: PLC0415

    if not args.link:
        raise UsageError("no join link was given", hint="coterie service install 'coterie://…' [flags of the worker]")
    link = JoinLink.from_text(args.link).to_text()
    path, link_file = _path(system), Path(service.link_file)
    text = _text(system, service)
    try:
        make_private_folder(link_file.parent)
        write_private(link_file, f"{link}\n".encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(_encoding(system)))
    except OSError as error:
        raise StorageError(
            f"cannot write the service's files: {error}", hint="check that you may write there"
        ) from error
    if args.json:
        print_json({"system": system, "path": str(path), "link_file": str(link_file), "next": _enable(system, path)})
        return 0
    print(f"written: {path}")
    print(f"written: {link_file} (the join link, readable by you only)")
    print("\nswitch it on:")
    for line in _enable(system, path):
        print(f"  {line}")
    return 0


def _remove(system: ServiceSystem, *, as_json: bool) -> int:
    removed = []
    for path in (_path(system), config_folder() / LINK_FILE):
        try:
            path.unlink()
            removed.append(str(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"cannot delete {path}: {error.strerror}", hint="delete it by hand") from error
    if as_json:
        print_json({"system": system, "removed": removed, "next": _disable(system)})
    elif removed:
        print("\n".join(f"deleted: {path}" for path in removed))
        print("\nswitch off what may still run:\n  " + "\n  ".join(_disable(system)))
    else:
        print("no service of coterie is installed here")
    return 0


def _text(system: ServiceSystem, service: WorkerService) -> str:
    match system:
        case "systemd":
            return systemd_unit(service)
        case "launchd":
            return launchd_plist(service)
        case "windows":
            return windows_task(service)


def _encoding(system: ServiceSystem) -> str:
    return "utf-16" if system == "windows" else "utf-8"


def _path(system: ServiceSystem) -> Path:
    """Where the system looks for the file; Windows is told where it is."""
    match system:
        case "systemd":
            home = os.environ.get("XDG_CONFIG_HOME", "")
            base = Path(home) if Path(home).is_absolute() else Path.home() / ".config"
            return base / "systemd" / "user" / f"{NAME}.service"
        case "launchd":
            return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        case "windows":
            return config_folder() / f"{NAME}.xml"


def _enable(system: ServiceSystem, path: Path) -> tuple[str, ...]:
    """The commands that switch the service on, each with what it is for."""
    match system:
        case "systemd":
            return (
                f"systemctl --user daemon-reload && systemctl --user enable --now {NAME}",
                "loginctl enable-linger              # to start with the machine, before you log in",
                f"journalctl --user -u {NAME} -f     # to see what it says",
            )
        case "launchd":
            return (
                f"launchctl bootstrap gui/$(id -u) {shlex.quote(str(path))}",
                f"tail -f {shlex.quote(str(config_folder() / LOG_FILE))}     # to see what it says",
            )
        case "windows":
            return (f'schtasks /Create /TN {NAME} /XML "{path}"', f"schtasks /Run /TN {NAME}")


def _disable(system: ServiceSystem) -> tuple[str, ...]:
    match system:
        case "systemd":
            return (f"systemctl --user disable --now {NAME}",)
        case "launchd":
            return (f"launchctl bootout gui/$(id -u)/{LABEL}",)
        case "windows":
            return (f"schtasks /End /TN {NAME}", f"schtasks /Delete /TN {NAME} /F")


def _system(chosen: ServiceSystem | None) -> ServiceSystem:
    if chosen is not None:
        return chosen
    found = _OF_PLATFORM.get(sys.platform)
    if found is None:
        raise UsageError(
            f"nothing is known of services on {sys.platform}",
            hint="give --system systemd, launchd or windows; in Termux, run the worker in termux-services or by hand",
        )
    return found


def _environment(known: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables of a worker that are set here: one that the system starts has to find the same folders.

    Raises:
        UsageError: One has characters that no service's file can hold.
    """
    found = []
    for name in _VARIABLES:
        value = known.get(name, "")
        if not value:
            continue
        _printable(name, value)
        found.append((name, value if value == IN_MEMORY else str(Path(value).expanduser().absolute())))
    return tuple(found)


def _flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The worker's flags that were given, as they are to be given to the worker; relative paths become whole.

    Raises:
        UsageError: A value has characters that no service's file can hold.
    """
    parser = Parser()
    add_flags(parser)
    words: list[str] = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of its arguments
        value = getattr(args, action.dest, action.default)
        if action.dest in _NO_FLAGS or value == action.default:
            continue
        flag = action.option_strings[-1]
        words.append(flag)
        if action.nargs != 0:
            is_path = isinstance(value, Path) or (action.metavar in _PATHS and value not in _NO_PATHS)
            words.append(_printable(flag, str(Path(value).expanduser().absolute()) if is_path else str(value)))
    return tuple(words)


def _printable(name: str, value: str) -> str:
    """The value, if a service's file can hold it: a line break in it would begin a line of its own there.

    Raises:
        UsageError: It has other characters.
    """
    if not value.isprintable():
        raise UsageError(f"{name} has characters that cannot be printed", hint="choose another name or folder")
    return value
