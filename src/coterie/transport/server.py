"""One port for everything: HTTPS and frame streams, told apart by ALPN; Unix sockets for workers on this machine."""

import asyncio
import shutil
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web

from coterie.errors import CoterieError, NetworkError
from coterie.logs import get_logger
from coterie.transport.accepting import TlsAcceptor
from coterie.transport.certificates import FRAME_PROTOCOL, Identity, make_identity, server_context
from coterie.transport.limits import BEFORE_ACCEPT, Limits
from coterie.transport.listening import cannot_listen, has_unix_sockets, make_unix_folder, tcp_listener
from coterie.transport.stream_link import MAX_UNREAD_BYTES, StreamLink

_log = get_logger(__name__)

MAX_WAITING_LINKS = 64
"""Links that are connected but not accepted; for a further one the oldest is dropped: nobody fills memory without a
token, and a flood of silent links keeps no device out, which shows its token at once."""
MAX_WEB_CONNECTIONS = 64
"""Likewise, of browsers and the owner's own commands."""
UNREAD_BEFORE_ACCEPT_BYTES = 64 * 1024


Carrier = Literal["tls", "plain", "unix"]


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who dialled: how, and from which address (empty for a Unix socket)."""

    carrier: Carrier
    address: str = ""


class ServedLink(StreamLink):
    """A link that a server took: strict limits until `accept`."""

    def __init__(self, on_lost: "Callable[[ServedLink], None]") -> None:
        super().__init__(BEFORE_ACCEPT, max_unread_bytes=UNREAD_BEFORE_ACCEPT_BYTES)
        self._on_lost = on_lost
        self._accepted = False

    @property
    def is_accepted(self) -> bool:
        """Whether the peer was let in."""
        return self._accepted

    def accept(self, limits: Limits | None = None) -> None:
        """Let the peer in: from now on `limits` hold, and the server does not drop the link for lateness."""
        self._accepted = True
        self.limits = limits or Limits()
        self.max_unread_bytes = MAX_UNREAD_BYTES

    def share_memory(self) -> None:
        """Let large frames pass through memory from now on: see `StreamLink`."""
        assert self._accepted, "memory is for peers that were let in"
        super().share_memory()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        super().connection_lost(exc)
        self._on_lost(self)


OnLink = Callable[[ServedLink, PeerInfo], Awaitable[None]]


class FrameServer:
    """Listens on one TLS port, on a Unix socket, and on plain loopback TCP if asked.

    Args:
        on_link: Called in a task of its own for every link; the link is closed when it raises. It should call
            `link.accept()` within `accept_timeout_s`, else the link is dropped.
        app: Answers HTTPS on the same port; without one, HTTP connections are closed.
        identity: The certificate; a new one by default.
        accept_timeout_s: How long a peer has to show its token.
    """

    def __init__(
        self,
        on_link: OnLink,
        *,
        app: web.Application | None = None,
        identity: Identity | None = None,
        accept_timeout_s: float = 10.0,
    ) -> None:
        self._on_link = on_link
        self._app = app
        self._identity = identity or make_identity()
        self._accept_timeout_s = accept_timeout_s
        self._runner: web.AppRunner | None = None
        self._acceptor: TlsAcceptor | None = None
        self._listeners: list[asyncio.Server] = []
        self._links: dict[ServedLink, None] = {}  # in the order they came
        self._tasks: set[asyncio.Task[None]] = set()
        self._unix_folder: Path | None = None
        self._port = 0
        self._plain_port = 0
        self._closed = False

    @property
    def port(self) -> int:
        """The TLS port."""
        return self._port

    @property
    def plain_port(self) -> int:
        """The port of plain TCP on 127.0.0.1; 0 if it was not asked for."""
        return self._plain_port

    @property
    def unix_path(self) -> Path | None:
        """The Unix socket; None where the platform has none."""
        return self._unix_folder / "link" if self._unix_folder else None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate."""
        return self._identity.fingerprint

    async def start(self, host: str | None = None, port: int = 0, *, plain_loopback: bool = False) -> None:
        """Open the port.

        Args:
            host: The address to listen on; None for all, IPv4 and IPv6.
            port: 0 for any free one.
            plain_loopback: Also listen on plain TCP on 127.0.0.1, without TLS, for measurements and tests.

        Raises:
            NetworkError: The port is taken or the address is not this machine's.
        """
        if self._app is not None:
            self._runner = web.AppRunner(self._app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
            await self._runner.setup()
        try:
            self._port = await self._listen_tls(host, port)
            await self._listen_unix()
            if plain_loopback:
                self._plain_port = await self._listen_plain()
        except OSError as error:
            await self.close()
            raise cannot_listen(host, port, error) from error

    async def close(self) -> None:
        """Free the port at once, then close every link and HTTP connection; idempotent."""
        self._closed = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        if self._acceptor is not None:
            await self._acceptor.close()
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(link.close() for link in tuple(self._links)))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._unix_folder is not None:
            shutil.rmtree(self._unix_folder, ignore_errors=True)
            self._unix_folder = None

    def protocol_for(self, transport: asyncio.Transport, carrier: Carrier) -> asyncio.BaseProtocol | None:
        """What a new connection speaks from here on; None: it is to be dropped."""
        if self._closed:
            return None
        if carrier == "tls":
            connection = transport.get_extra_info("ssl_object")
            assert isinstance(connection, ssl.SSLObject)
            if connection.selected_alpn_protocol() != FRAME_PROTOCOL:
                return self._web_protocol()
        waiting = [link for link in self._links if not link.is_accepted]
        if len(waiting) >= MAX_WAITING_LINKS:
            _log.warning("more than %d links wait to be accepted; the oldest was dropped", MAX_WAITING_LINKS)
            waiting[0].abort(NetworkError("too many peers wait to be let in"))
        return self._take_link(transport, carrier)

    def _web_protocol(self) -> asyncio.BaseProtocol | None:
        server = self._runner.server if self._runner else None
        if server is None:
            return None
        open_ones = server.connections
        if len(open_ones) >= MAX_WEB_CONNECTIONS and (oldest := open_ones[0].transport) is not None:
            _log.warning("more than %d HTTP connections are open; the oldest was dropped", MAX_WEB_CONNECTIONS)
            oldest.abort()
        return server()

    def _take_link(self, transport: asyncio.Transport, carrier: Carrier) -> ServedLink:
        link = ServedLink(lambda lost: self._links.pop(lost, None))
        self._links[link] = None
        peer = PeerInfo(carrier=carrier, address=_address(transport))
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(link, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        loop.call_later(self._accept_timeout_s, self._drop_late, link)
        return link

    async def _serve(self, link: ServedLink, peer: PeerInfo) -> None:
        try:
            await self._on_link(link, peer)
        except CoterieError as error:
            _log.info("link from %s %s closed: %s", peer.carrier, peer.address, error.message)
            await link.close()
        except BaseException:
            link.abort()
            raise

    def _drop_late(self, link: ServedLink) -> None:
        if not link.is_accepted and not link.is_closed:
            link.abort(NetworkError(f"the peer was not let in within {self._accept_timeout_s:g} s"))

    async def _listen_tls(self, host: str | None, port: int) -> int:
        listener = tcp_listener(host, port)
        self._acceptor = TlsAcceptor(listener, server_context(self._identity), lambda: _Door(self, "tls"))
        return int(listener.getsockname()[1])

    async def _listen_plain(self) -> int:
        listener = tcp_listener("127.0.0.1", 0)
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_server(lambda: _Door(self, "plain"), sock=listener))
        return int(listener.getsockname()[1])

    async def _listen_unix(self) -> None:
        if not has_unix_sockets():
            return
        self._unix_folder = make_unix_folder()
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _Door(self, "unix"), str(self.unix_path))
        self._listeners.append(server)


def _address(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""


class _Door(asyncio.Protocol):
    """The protocol of a connection in its first moment: hands it to the one that it turns out to speak."""

    def __init__(self, server: FrameServer, carrier: Carrier) -> None:
        self._server = server
        self._carrier = carrier

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        protocol = self._server.protocol_for(transport, self._carrier)
        if protocol is None:
            transport.abort()
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
