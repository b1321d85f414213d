"""Listening sockets, with the branches that platforms need."""

import asyncio
import errno
import os
import socket
import tempfile
from pathlib import Path

from coterie.errors import NetworkError

_BACKLOG = 128
_MAX_UNIX_PATH = 100
"""Below what kernels take: 104 on macOS, 108 on Linux."""


def tcp_listener(host: str | None, port: int) -> socket.socket:
    """A listening socket; with no host, one for IPv6 and IPv4 together, so that both have the same port.

    Raises:
        OSError: The port is taken, or the address is not this machine's.
    """
    if host is not None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise  # else: the kernel knows IPv6 but it is switched off
    return socket.create_server(("", port), backlog=_BACKLOG)


def check_port(host: str | None, port: int) -> None:
    """Open the port and close it again: a taken one should be told before a run is prepared.

    Raises:
        NetworkError: The port is taken or the address is not this machine's.
    """
    try:
        tcp_listener(host, port).close()
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str | None, port: int, error: OSError) -> NetworkError:
    """What is said of a port that the system does not open."""
    return NetworkError(
        f"cannot listen on {host or 'all addresses'} port {port}: {error.strerror or error}",
        hint="choose another port, or 0 for any free one",
    )


def has_unix_sockets() -> bool:
    """Whether asyncio serves Unix sockets here (not on Windows)."""
    return hasattr(socket, "AF_UNIX") and hasattr(asyncio, "open_unix_connection")


def make_unix_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket in it."""
    folder = tempfile.mkdtemp(prefix="coterie-")
    if len(os.fsencode(folder)) > _MAX_UNIX_PATH - len("/link"):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="coterie-", dir="/tmp")
    return Path(folder)
