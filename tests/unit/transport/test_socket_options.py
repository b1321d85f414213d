import socket
import sys
from collections.abc import Iterator

import pytest

from coterie.transport.socket_options import LOW_WATER_BYTES, LowWater, is_tcp, notice_dead_peer

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the option is left alone")


@pytest.fixture
def tcp_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        yield sock


def mark_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@linux_only
@pytest.mark.parametrize(
    ("missing_bytes", "margin_bytes", "mark"),
    [
        (0, 0, 1),
        (1, 0, 1),
        (1000, 0, 1000),
        (1000, 400, 600),
        (1000, 5000, 1),
        (LOW_WATER_BYTES * 10, 0, LOW_WATER_BYTES),
        (LOW_WATER_BYTES + 400, 400, LOW_WATER_BYTES),
    ],
)
def test_the_mark_is_never_above_what_is_sure_to_come(
    tcp_socket: socket.socket, missing_bytes: int, margin_bytes: int, mark: int
) -> None:
    low_water = LowWater(tcp_socket, margin_bytes=margin_bytes)
    low_water.expect(LOW_WATER_BYTES * 10)
    low_water.expect(missing_bytes)
    assert mark_of(tcp_socket) == mark


@linux_only
def test_after_a_frame_any_byte_wakes_the_reader_again(tcp_socket: socket.socket) -> None:
    low_water = LowWater(tcp_socket, margin_bytes=0)
    low_water.expect(LOW_WATER_BYTES * 10)
    assert mark_of(tcp_socket) == LOW_WATER_BYTES
    low_water.expect(0)
    assert mark_of(tcp_socket) == 1


def test_a_closed_socket_is_no_error(tcp_socket: socket.socket) -> None:
    low_water = LowWater(tcp_socket, margin_bytes=0)
    tcp_socket.close()
    low_water.expect(LOW_WATER_BYTES)
    low_water.expect(0)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this platform has no Unix sockets")
def test_a_unix_socket_is_left_alone() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        assert not is_tcp(sock)
        notice_dead_peer(sock)
        LowWater(sock, margin_bytes=0).expect(LOW_WATER_BYTES)
        assert mark_of(sock) == 1
