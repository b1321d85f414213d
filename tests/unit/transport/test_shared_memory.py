"""The memory that two links share: where frames lie in it, what is refused, and that nothing of it is left."""

import array
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ProtocolError
from coterie.transport.shared_memory import (
    HALF_BYTES,
    LEAST_BYTES,
    DescriptorSocket,
    Ring,
    SharedMemory,
    knows_memory_files,
    make_memory,
    open_memory,
)
from coterie.units import MIB

if sys.platform != "linux" or not knows_memory_files():
    pytest.skip("only Linux has anonymous memory files, and not every Python there", allow_module_level=True)

import fcntl
import resource

NOTE = b"a frame that tells of memory"
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def open_descriptors() -> list[str]:
    """What each open descriptor of this process stands for."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that this listing itself took
            found.append(str(link.readlink()))
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor stays open and no memory stays mapped."""
    yield
    assert "memfd:coterie" not in Path("/proc/self/maps").read_text()
    assert not [name for name in open_descriptors() if "memfd:coterie" in name]


def passed() -> tuple[socket.socket, DescriptorSocket]:
    """Two ends of a Unix socket; the second one keeps descriptors."""
    one, other = socket.socketpair()
    return one, DescriptorSocket(fileno=other.detach())


@pytest.fixture
def ends() -> Iterator[tuple[SharedMemory, SharedMemory]]:
    """Both ends of shared memory: the one that made it, and the one that it was passed to."""
    one, other = passed()
    with one, other:
        made = make_memory(one, NOTE)
        assert made is not None
        buffer = bytearray(len(NOTE))
        assert other.recv_into(buffer) == len(NOTE)
        opened = open_memory(other.take_descriptors())
        assert opened is not None
        yield made, opened
        made.close()
        opened.close()


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3)), max_size=60))
def test_frames_in_a_ring_never_overlap_and_an_empty_ring_takes_any_that_fits(steps: list[tuple[int, int]]) -> None:
    ring, held = Ring(1024), deque[tuple[int, int]]()
    for size, freed in steps:
        offset = ring.place(size)
        if offset is None:
            assert held, "an empty ring has room"
        else:
            assert 0 <= offset <= 1024 - size
            assert all(offset + size <= start or end <= offset for start, end in held)
            held.append((offset, offset + size))
        ring.free(freed)
        for _ in range(min(freed, len(held))):
            held.popleft()


def test_a_frame_that_is_withdrawn_leaves_its_room_to_the_next() -> None:
    ring = Ring(1024)
    assert ring.place(512) == 0
    assert ring.place(512) == 512
    ring.withdraw()
    assert ring.place(500) == 512
    assert ring.place(1) is None


def test_tensors_pass_both_ways_and_room_comes_back_only_once_they_were_copied_out(
    ends: tuple[SharedMemory, SharedMemory],
) -> None:
    for sender, receiver in (ends, ends[::-1]):
        sent = [bytes([number]) * (HALF_BYTES // 2) for number in range(3)]
        offsets = [sender.put([data[: MIB + 1], b"", data[MIB + 1 :]]) for data in sent]
        assert offsets == [0, HALF_BYTES // 2, None], "the third one finds no room"
        for data, offset in zip(sent[:2], offsets[:2], strict=True):
            assert offset is not None
            buffers = [memoryview(bytearray(MIB + 1)), memoryview(bytearray(HALF_BYTES // 2 - MIB - 1))]
            receiver.take(offset, buffers)
            assert b"".join(buffers) == data
        assert sender.put([sent[2]]) == 0


def test_small_frames_and_those_larger_than_the_memory_stay_with_the_socket(
    ends: tuple[SharedMemory, SharedMemory],
) -> None:
    assert ends[0].put([bytes(LEAST_BYTES - 1)]) is None
    assert ends[0].put([bytes(HALF_BYTES), b"1"]) is None
    assert ends[0].put([]) is None
    assert ends[0].put([bytes(LEAST_BYTES)]) == 0


@given(offset=st.integers(0, 2**64 - 1), size=st.integers(0, 4096))
def test_only_what_lies_in_the_memory_is_read(offset: int, size: int) -> None:
    one, other = passed()
    with one, other:
        made = make_memory(one, NOTE)
        assert made is not None
        buffer = memoryview(bytearray(size))
        if offset + size <= HALF_BYTES:
            made.take(offset, [buffer])
        else:
            with pytest.raises(ProtocolError, match="shared memory"):
                made.take(offset, [buffer])
        made.close()


def test_a_peer_that_gives_back_more_than_it_has_gains_no_room_and_one_that_gives_nothing_blocks_nobody(
    ends: tuple[SharedMemory, SharedMemory],
) -> None:
    one, other = ends
    for _ in range(2000):  # more than the socket for it holds
        other.take(0, [memoryview(bytearray(1))])
    assert one.put([bytes(HALF_BYTES)]) == 0
    one.put([bytes(LEAST_BYTES)])  # 2000 answers have come for one frame
    assert other.put([bytes(HALF_BYTES)]) == 0
    assert all(other.put([bytes(LEAST_BYTES)]) is None for _ in range(50))


def test_where_the_system_has_no_more_memory_frames_stay_with_the_socket(
    ends: tuple[SharedMemory, SharedMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ends[0].put([bytes(MIB)]) == 0

    def none_left(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    assert ends[0].put([bytes(MIB)]) is None
    ends[1].take(0, [memoryview(bytearray(MIB))])
    assert ends[0].put([bytes(MIB)]) == 0, "what there is stays in use"


def test_a_closed_end_takes_and_gives_nothing(ends: tuple[SharedMemory, SharedMemory]) -> None:
    one, other = ends
    assert one.put([bytes(MIB)]) == 0
    one.close()
    one.close()
    assert one.put([bytes(MIB)]) is None
    data = memoryview(bytearray(MIB))
    other.take(0, [data])  # its own mapping still stands; there is nobody to tell that it was read
    other.close()
    with pytest.raises(ProtocolError):
        other.take(0, [data])


def memory_file(size_bytes: int, seals: int) -> int:
    descriptor = os.memfd_create("coterie", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_memory_that_could_shrink_or_has_another_size_is_not_used_and_its_descriptors_are_closed(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    offers = {
        "shrink": memory_file(2 * HALF_BYTES, fcntl.F_SEAL_GROW),
        "it has 4096 bytes": memory_file(4096, ALL_SEALS),
        "Invalid argument": os.open(tmp_path / "file", os.O_RDWR),
    }
    for reason, descriptor in offers.items():
        one, other = socket.socketpair()
        with one:
            caplog.clear()
            with caplog.at_level("DEBUG"):
                assert open_memory((descriptor, other.detach())) is None
            assert reason in caplog.text
            assert one.recv(1) == b"", "the other end is closed"
    assert open_memory(()) is None
    read, write = os.pipe()
    os.close(write)
    assert open_memory((memory_file(2 * HALF_BYTES, ALL_SEALS), read)) is None, "no socket to answer on"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_no_memory_is_made_for_a_socket_that_leads_to_another_machine_or_to_nobody() -> None:
    with socket.socket(socket.AF_INET) as network:
        assert make_memory(network, NOTE) is None
    one, other = socket.socketpair()
    other.close()
    with one:
        assert make_memory(one, NOTE) is None


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many more files and no further one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    taken: list[int] = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    try:
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("left", range(6))
def test_where_no_more_files_may_be_open_no_memory_is_made_and_none_of_it_is_left(left: int) -> None:
    one, other = passed()
    with one, other:
        before = len(open_descriptors())
        with descriptors_left(left):
            made = make_memory(one, NOTE)
        assert (made is not None) == (left >= 5)
        if made is not None:
            made.close()
        assert len(open_descriptors()) == before


def test_a_python_that_was_built_without_memory_files_makes_and_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = passed()
    with one, other, monkeypatch.context() as without:
        without.delattr(os, "memfd_create")
        without.delattr(fcntl, "F_GET_SEALS")
        without.delattr(fcntl, "F_ADD_SEALS")
        assert make_memory(one, NOTE) is None
        assert open_memory(os.pipe()) is None


def test_descriptors_that_nobody_takes_are_closed_with_the_socket_and_further_ones_are_never_kept() -> None:
    one, other = passed()
    before = len(open_descriptors())
    with one, other:
        pipes = [os.pipe() for _ in range(3)]
        for pipe in pipes:
            socket.send_fds(one, [b"x"], list(pipe))
            assert other.recv_into(bytearray(10)) == 1
        socket.send_fds(one, [b"x"], list(array.array("i", pipes[0])))
        assert len(open_descriptors()) == before + 6 + 2
        for descriptor in (number for pipe in pipes for number in pipe):
            os.close(descriptor)
    assert len(open_descriptors()) == before - 2
