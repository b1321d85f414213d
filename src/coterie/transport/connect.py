"""Dialling a coordinator: every candidate address, until one answers with the right certificate."""

import asyncio
import contextlib
import socket
import ssl
import sys
from pathlib import Path

from coterie.errors import CoterieError, JoinRefusedError, NetworkError, VersionMismatchError
from coterie.transport.certificates import FRAME_PROTOCOL, check_peer, client_context
from coterie.transport.join_link import JoinLink
from coterie.transport.limits import Limits
from coterie.transport.shared_memory import DescriptorSocket
from coterie.transport.stream_link import StreamLink
from coterie.units import counted

PROBE_TIMEOUT_S = 8.0
"""For each address: a wrong one often never answers; a right one takes seconds if the devices are weak and busy."""

HEAD_START_S = 0.25
"""Before the next candidate is dialled too; what RFC 8305 recommends is of that size."""


async def connect(join: JoinLink, *, limits: Limits | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> StreamLink:
    """Dial the candidates of a join link; the first one that shows the right certificate is taken.

    Each has a head start over the next: of several that answer, the better one is taken, and of dead ones none holds
    up the others.

    Args:
        join: Where to dial and which certificate to expect; its token is not sent by this function.
        limits: Of frames in both directions.
        timeout_s: For each candidate.

    Raises:
        NetworkError: No candidate answered; the message lists what each one did.
        JoinRefusedError: A candidate answered with another certificate, and no other with the right one.
        VersionMismatchError: The right server answered, but speaks no frame stream of this version.
    """
    race = _Race(join, limits or Limits(), timeout_s)
    link = await race.run()
    if link is not None:
        return link
    if race.refusal is not None:
        raise race.refusal
    raise NetworkError(
        f"no coordinator at port {join.port} of {counted(len(join.hosts), 'address', 'addresses')}: "
        + "; ".join(f"{host}: {race.failures[host]}" for host in dict.fromkeys(join.hosts)),
        hint="is the coordinator running, on a network that this device can reach, with the port open in its firewall? "
        "If that run is over, its link leads nowhere: the next run prints another",
    )


class _Race:
    """All candidates of a join link, dialled at once but for their head starts."""

    def __init__(self, join: JoinLink, limits: Limits, timeout_s: float) -> None:
        self._join = join
        self._limits = limits
        self._timeout_s = timeout_s
        self._dialled: dict[asyncio.Task[StreamLink], str] = {}
        self.failures: dict[str, str] = {}
        self.refusal: JoinRefusedError | None = None

    async def run(self) -> StreamLink | None:
        """The first right link; None once all have failed."""
        loop = asyncio.get_running_loop()
        try:
            for host in dict.fromkeys(self._join.hosts):
                task = loop.create_task(_dial(host, self._join, self._limits, self._timeout_s))
                self._dialled[task] = host
                if (link := await self._next(HEAD_START_S)) is not None:
                    return link
            return await self._next(None)
        finally:
            await self._end_all()

    async def _next(self, seconds: float | None) -> StreamLink | None:
        """The first right link within that time; None also as soon as nobody is left who may still answer."""
        loop = asyncio.get_running_loop()
        end_s = None if seconds is None else loop.time() + seconds
        while self._dialled:
            left_s = None if end_s is None else max(end_s - loop.time(), 0.0)
            done, _ = await asyncio.wait(self._dialled, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return None
            for task in [task for task in self._dialled if task in done]:
                if (link := self._result(task)) is not None:
                    return link
        return None

    def _result(self, task: asyncio.Task[StreamLink]) -> StreamLink | None:
        """What became of one; only the wrong version of the right server ends the race for all."""
        host = self._dialled.pop(task)
        try:
            return task.result()
        except JoinRefusedError as error:
            self.refusal = error
            self.failures[host] = "another certificate"
        except TimeoutError:
            self.failures[host] = f"no answer within {self._timeout_s:g} s"
        except (OSError, NetworkError) as error:
            self.failures[host] = f"{error.strerror or error if isinstance(error, OSError) else error}"
        return None

    async def _end_all(self) -> None:
        for task in self._dialled:
            task.cancel()
        for outcome in await asyncio.gather(*self._dialled, return_exceptions=True):
            if isinstance(outcome, StreamLink):
                outcome.abort()


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
    sock = DescriptorSocket(socket.AF_UNIX)
    sock.settimeout(0)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, str(path))
                _, link = await loop.create_unix_connection(lambda: StreamLink(limits, descriptors=sock), sock=sock)
        except (OSError, TimeoutError) as error:
            raise NetworkError(f"no listener at {path}: {error or 'no answer'}") from error
        undo.pop_all()
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
