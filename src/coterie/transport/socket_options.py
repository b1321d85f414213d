"""Options set on a link's socket, where the platform has them."""

import socket
import sys

KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
LOW_WATER_BYTES = 1024 * 1024
TLS_LOW_WATER_BYTES = 256 * 1024
"""asyncio's TLS reads no more than this from the socket at a time, so a higher mark would gain nothing."""
TLS_RECORD_BYTES = 16 * 1024 + 512
"""What TLS may hold back until a record is whole."""


def is_tcp(sock: socket.socket) -> bool:
    """Whether a socket (or asyncio's stand-in for one) is TCP over IPv4 or IPv6."""
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def notice_dead_peer(sock: socket.socket) -> None:
    """Let the kernel end a half-open connection after about half a minute, idle or with unacknowledged bytes."""
    if not is_tcp(sock):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,  # Linux, Windows
        "TCP_KEEPALIVE": KEEPALIVE_IDLE_S,  # macOS's name of the same
        "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES) * 1000,  # Linux
    }
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class LowWater:
    """Wakes the reader of a slow link once per MiB or quarter of it, not once per packet (`SO_RCVLOWAT`).

    At 100 Mbit/s this is most of the receiver's CPU. The mark must never be above what is sure to come, or the last
    bytes of a frame would wait for the next one; the kernel itself lowers it to half of what it may buffer. Linux only:
    elsewhere polling does not honour the option, or nobody has checked that it does.
    """

    def __init__(self, sock: socket.socket, *, encrypted: bool) -> None:
        self._socket = sock
        self._margin_bytes = TLS_RECORD_BYTES if encrypted else 0
        self._most_bytes = TLS_LOW_WATER_BYTES if encrypted else LOW_WATER_BYTES
        self._value = 1
        self._works = sys.platform == "linux" and is_tcp(sock) and hasattr(socket, "SO_RCVLOWAT")

    def expect(self, missing_bytes: int) -> None:
        """Set the mark for a frame of which `missing_bytes` have not been read yet (0: no frame is being read)."""
        value = max(1, min(missing_bytes - self._margin_bytes, self._most_bytes))
        if value == self._value or not self._works:
            return
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, value)
        except OSError:
            self._works = (
                False  # the socket is closed or the kernel refuses: every packet wakes us, nothing else changes
            )
        self._value = value
