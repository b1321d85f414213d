"""Taking connections of strangers: so many at a time, each for so long, and the newest rather than the oldest.

Whoever knows the address may connect, and asyncio's own server would keep any number of handshakes that never end.
Here a full house drops whoever has been in its handshake for longest: a flood of idle connections thus never keeps out
a device, whose handshake takes moments.
"""

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable

from coterie.logs import get_logger

_log = get_logger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 2.0
MAX_HANDSHAKES = 64
ACCEPT_PAUSE_S = 0.2
"""After the system would not give a connection (too many open files): those that are open end meanwhile."""


class TlsAcceptor:
    """Serves one listening socket: each connection's TLS handshake, then a protocol.

    Args:
        listener: Listening; closed with this.
        context: The server's TLS.
        make_protocol: Called once per connection; its `connection_made` comes after the handshake.
    """

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        listener.settimeout(0)
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._handshakes: dict[asyncio.Task[None], None] = {}  # in the order they came
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Free the port; connections whose handshake is over stay."""
        tasks = {self._accepting, *self._handshakes}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                _log.warning("more than %d connections are in their handshake; the oldest was dropped", MAX_HANDSHAKES)
                del self._handshakes[oldest]
                oldest.cancel()
            task = loop.create_task(self._shake_hands(connection))
            self._handshakes[task] = None
            task.add_done_callback(functools.partial(self._ended, connection))

    def _ended(self, connection: socket.socket, task: "asyncio.Task[None]") -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():
            connection.close()  # nobody else does if the handshake had not begun yet

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:  # a browser that dislikes the certificate, a port scanner, no TLS at all
            _log.info("a connection ended in its handshake: %s", error)
