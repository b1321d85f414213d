"""How `coterie worker` finds its run: by a join link, or in the local network by a token."""

import argparse
import asyncio
import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.parser import Parser
from coterie.errors import MissingPackageError, UsageError
from coterie.local import JOIN_LINK_VARIABLE
from coterie.units import counted

if TYPE_CHECKING:
    from coterie.transport.discovery import FoundRun
    from coterie.transport.join_link import JoinLink

TOKEN_VARIABLE = "COTERIE_JOIN_TOKEN"  # noqa: S105 - the variable's name
LOOK_S = 3.0
"""How long to look for runs in the network."""


def add_joining(parser: Parser) -> None:
    """The link, or what stands in its place."""
    parser.add_argument(
        "link",
        nargs="?",
        help=f"the join link, in quotes; else the variable {JOIN_LINK_VARIABLE}; else a run is looked for in this "
        "network",
    )
    parser.add_argument("--link-file", type=Path, metavar="FILE", help="read the join link from this file")
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help="the part of the join link behind #, for a run that is found in this network; else the variable "
        f"{TOKEN_VARIABLE}, else it is asked for",
    )
    parser.add_argument("--run", dest="run_id", metavar="RUN", help="which run to join, if several are found")


def join_link_of(args: argparse.Namespace) -> "JoinLink":
    """The join link that was given, or that of the run that was found.

    Raises:
        UsageError: There is none, or more than one; or runs cannot be looked for, as the package for it is absent.
        CoterieError: Who announces the run does not know the token.
    """
    from coterie.transport.join_link import JoinLink  # noqa: PLC0415 - cryptography and aiohttp are slow to import

    text = _link_text(args)
    if not text:
        return _found_link(args)
    if args.token or args.run_id:
        raise UsageError("--token and --run are for runs that are found in the network", hint="leave them out")
    return JoinLink.from_text(text)


def _link_text(args: argparse.Namespace) -> str:
    kept = os.environ.pop(JOIN_LINK_VARIABLE, "")
    text: str = args.link or ""
    if text and args.link_file is not None:
        raise UsageError("a join link and a file with one were given", hint="give one of the two")
    if args.link_file is not None:
        try:
            text = args.link_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"the join link cannot be read from {args.link_file}: {error}",
                hint="`coterie service install LINK` writes such a file",
            ) from error
        if not text:
            raise UsageError(f"{args.link_file} is empty", hint="`coterie service install LINK` writes such a file")
    return text or kept


def _found_link(args: argparse.Namespace) -> "JoinLink":
    from coterie.transport.discovery import find_runs, require_discovery  # noqa: PLC0415 - see above
    from coterie.transport.pairing import pair  # noqa: PLC0415

    try:
        require_discovery()
    except MissingPackageError as error:  # what is missing is a link; the package is the other way
        raise UsageError(f"no join link was given, and {error.message}", hint=error.hint) from error
    print(f"no join link was given: looking for runs in this network for {LOOK_S:.0f} s", file=sys.stderr)
    run = _chosen(asyncio.run(find_runs(LOOK_S)), args.run_id)
    return pair(run, _token(args, run))


def _chosen(found: "tuple[FoundRun, ...]", wanted: str | None) -> "FoundRun":
    """The one run that is meant.

    Raises:
        UsageError: None is, or several may be.
    """
    matching = [run for run in found if wanted in (None, run.run)]
    if len(matching) == 1:
        return matching[0]
    if not found:
        raise UsageError(
            "no join link was given, and no run is announced in this network",
            hint="copy the command that `coterie train` printed, or start the run with --announce",
        )
    listed = "".join(f"\n  {run.run} at {run.hosts[0]} port {run.port}" for run in found)
    if not matching:
        raise UsageError(f"no run {wanted} is announced in this network, but:{listed}", hint="choose one with --run")
    raise UsageError(
        f"{counted(len(matching), 'run')} are announced in this network:{listed}", hint="choose one with --run"
    )


def _token(args: argparse.Namespace, run: "FoundRun") -> str:
    token: str = args.token or os.environ.pop(TOKEN_VARIABLE, "")
    if not token and sys.stdin.isatty():
        token = getpass.getpass(f"token of run {run.run} (the part of its join link behind #): ").strip()
    if not token:
        raise UsageError(
            f"run {run.run} was found, and no token was given",
            hint=f"give the part of its join link behind # with --token, or in the variable {TOKEN_VARIABLE}",
        )
    return token
