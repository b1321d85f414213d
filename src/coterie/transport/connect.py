"""Dialling a coordinator: every candidate address in turn until one answers with the right certificate."""

import asyncio
import ssl
import sys
from pathlib import Path

from coterie.errors import CoterieError, JoinRefusedError, NetworkError, VersionMismatchError
from coterie.transport.certificates import FRAME_PROTOCOL, check_peer, client_context
from coterie.transport.join_link import JoinLink
from coterie.transport.limits import Limits
from coterie.transport.stream_link import StreamLink
from coterie.units import counted

PROBE_TIMEOUT_S = 8.0
"""For each address: a wrong one often never answers; a right one takes seconds if the devices are weak and busy."""


async def connect(join: JoinLink, *, limits: Limits | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> StreamLink:
    """Dial the candidates of a join link in order; the first one with the right certificate is taken.

    Args:
        join: Where to dial and which certificate to expect; its token is not sent by this function.
        limits: Of frames in both directions.
        timeout_s: For each candidate.

    Raises:
        NetworkError: No candidate answered; the message lists what each one did.
        JoinRefusedError: A candidate answered with another certificate, and no other with the right one.
        VersionMismatchError: The right server answered, but speaks no frame stream of this version.
    """
    failures: list[str] = []
    refusal: CoterieError | None = None
    for host in join.hosts:
        try:
            return await _dial(host, join, limits or Limits(), timeout_s)
        except JoinRefusedError as error:
            refusal = error
            failures.append(f"{host}: another certificate")
        except TimeoutError:
            failures.append(f"{host}: no answer within {timeout_s:g} s")
        except (OSError, NetworkError) as error:
            failures.append(f"{host}: {error.strerror or error if isinstance(error, OSError) else error}")
    if refusal is not None:
        raise refusal
    raise NetworkError(
        f"no coordinator at port {join.port} of {counted(len(join.hosts), 'address', 'addresses')}: "
        + "; ".join(failures),
        hint="is the coordinator running, on a network that this device can reach, with the port open in its firewall?",
    )


async def connect_plain(
    host: str, port: int, *, limits: Limits | None = None, timeout_s: float = PROBE_TIMEOUT_S
) -> StreamLink:
    """Dial a plain TCP listener without TLS, on this machine only.

    Raises:
        NetworkError: Nobody listens there.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, link = await loop.create_connection(lambda: StreamLink(limits), host, port)
    except (OSError, TimeoutError) as error:
        raise NetworkError(f"no plain listener at {host} port {port}: {error or 'no answer'}") from error
    return link


async def connect_unix(path: Path, *, limits: Limits | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> StreamLink:
    """Dial the Unix socket of a server on this machine.

    Raises:
        NetworkError: Nobody listens there, or this platform has no Unix sockets.
    """
    if sys.platform == "win32":
        raise NetworkError("Windows has no Unix sockets for this", hint="use the join link instead")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, link = await loop.create_unix_connection(lambda: StreamLink(limits), str(path))
    except (OSError, TimeoutError) as error:
        raise NetworkError(f"no listener at {path}: {error or 'no answer'}") from error
    return link


async def _dial(host: str, join: JoinLink, limits: Limits, timeout_s: float) -> StreamLink:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        transport, link = await loop.create_connection(
            lambda: StreamLink(limits),
            host,
            join.port,
            ssl=client_context(),
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=2.0,
            happy_eyeballs_delay=0.25,  # a name with a dead IPv6 address must not eat the whole time
        )
    connection = transport.get_extra_info("ssl_object")
    assert isinstance(connection, ssl.SSLObject)
    try:
        check_peer(connection, join.fingerprint)
        if connection.selected_alpn_protocol() != FRAME_PROTOCOL:
            raise VersionMismatchError(
                f"the server does not speak {FRAME_PROTOCOL}, this side does",
                hint="install the same version of coterie on every device",
            )
    except CoterieError:
        link.abort()
        raise
    return link
