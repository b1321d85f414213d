import socket
import sys
from collections.abc import Iterator

import pytest

from coterie.transport.socket_options import (
    LOW_WATER_BYTES,
    TLS_LOW_WATER_BYTES,
    TLS_RECORD_BYTES,
    LowWater,
    is_tcp,
    notice_dead_peer,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the option is left alone")


@pytest.fixture
def tcp_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        yield sock


def mark_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@linux_only
@pytest.mark.parametrize(
    ("missing_bytes", "encrypted", "mark"),
    [
        (0, False, 1),
        (1, False, 1),
        (1000, False, 1000),
        (1000, True, 1),
        (TLS_RECORD_BYTES + 600, True, 600),
        (LOW_WATER_BYTES * 10, False, LOW_WATER_BYTES),
        (LOW_WATER_BYTES * 10, True, TLS_LOW_WATER_BYTES),
        (TLS_LOW_WATER_BYTES + TLS_RECORD_BYTES, True, TLS_LOW_WATER_BYTES),
        (TLS_LOW_WATER_BYTES, True, TLS_LOW_WATER_BYTES - TLS_RECORD_BYTES),
    ],
)
def test_the_mark_is_never_above_what_is_sure_to_come(
    tcp_socket: socket.socket, missing_bytes: int, encrypted: bool, mark: int
) -> None:
    low_water = LowWater(tcp_socket, encrypted=encrypted)
    low_water.expect(LOW_WATER_BYTES * 10)
    low_water.expect(missing_bytes)
    assert mark_of(tcp_socket) == mark


@linux_only
def test_after_a_frame_any_byte_wakes_the_reader_again(tcp_socket: socket.socket) -> None:
    low_water = LowWater(tcp_socket, encrypted=False)
    low_water.expect(LOW_WATER_BYTES * 10)
    assert mark_of(tcp_socket) == LOW_WATER_BYTES
    low_water.expect(0)
    assert mark_of(tcp_socket) == 1


def test_a_closed_socket_is_no_error(tcp_socket: socket.socket) -> None:
    low_water = LowWater(tcp_socket, encrypted=False)
    tcp_socket.close()
    low_water.expect(LOW_WATER_BYTES)
    low_water.expect(0)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this platform has no Unix sockets")
def test_a_unix_socket_is_left_alone() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        assert not is_tcp(sock)
        notice_dead_peer(sock)
        LowWater(sock, encrypted=False).expect(LOW_WATER_BYTES)
        assert mark_of(sock) == 1
