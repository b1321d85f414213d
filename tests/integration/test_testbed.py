"""The test bed: its relay passes, cuts and mends; real processes on it go through each fault to the same weights."""

import socket
import threading

import pytest

from coterie.transport.join_link import JoinLink
from faults_matrix import Matrix
from faults_setting import Setting
from testbed import MBIT, RelayCarrier, Shape
from testbed.facilities import probe
from testbed.faults import FAULTS


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def relay():
    carrier = RelayCarrier()
    yield carrier
    carrier.close()


def exactly(connection, count):
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


def address(line, port):
    reached = line.reach(JoinLink(hosts=("x",), port=port, fingerprint="ab" * 32, token="t" * 10))
    return reached.hosts[0], reached.port


def dial(line, port):
    return socket.create_connection(address(line, port), timeout=60)


def test_the_relay_passes_bytes_both_ways_at_any_shape_and_counts_them(relay, echo):
    line = relay.line("phone")
    with dial(line, echo) as connection:
        for shape in (Shape(), Shape(bytes_per_s=100 * MBIT, latency_s=0.001)):
            line.shape(shape)
            connection.sendall(b"x" * 100_000)
            assert exactly(connection, 100_000) == b"x" * 100_000
    assert line.moved() == (200_000, 200_000)


def test_what_is_sent_into_a_silent_cut_arrives_after_it(relay, echo):
    line = relay.line("phone")
    with dial(line, echo) as connection:
        line.cut("silent")
        connection.sendall(b"are you there?")
        assert line.moved() == (0, 0)
        line.restore()
        assert exactly(connection, 14) == b"are you there?"


def test_a_closing_cut_ends_connections_and_refuses_new_ones_until_it_is_mended(relay, echo):
    line = relay.line("phone")
    place = address(line, echo)
    with dial(line, echo) as connection:
        connection.sendall(b"x")
        assert exactly(connection, 1) == b"x"
        line.cut("closed")
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)
    line.restore()
    with dial(line, echo) as connection:
        connection.sendall(b"y")
        assert exactly(connection, 1) == b"y"


def test_one_hosts_cut_does_not_touch_another(relay, echo):
    phone, laptop = relay.line("phone"), relay.line("laptop")
    with dial(phone, echo), dial(laptop, echo) as other:
        phone.cut("silent")
        other.sendall(b"z")
        assert exactly(other, 1) == b"z"


def test_what_the_machine_gives_is_found_without_leaving_anything_behind():
    assert probe() == probe()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    setting = Setting(tmp_path_factory.mktemp("cells"), steps=30)
    yield Matrix(setting, seeds=2)
    setting.close()


@pytest.mark.slow
@pytest.mark.timeout(1900)  # the first makes the undisturbed run too, and each may take `LONGEST_S`
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_run_goes_through_each_fault_of_its_middle_stage_to_the_same_weights(fault, matrix):
    cell = matrix.cell(fault, "middle", "flush")
    assert cell.failure == ""
    assert cell.unequal == 0
