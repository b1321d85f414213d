"""Free memory of a device: used again, and never more of it than was needed at once."""

import random

import pytest

from coterie.backends.buffer_pool import SLACK_BYTES, BufferPool
from coterie.backends.engine import Buffer
from coterie.errors import BackendError

MANY = SLACK_BYTES // 4
"""Floats that fill the slack."""


class Device:
    """Counts what was made and is still alive."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.waits = 0
        self.pool = BufferPool(self.make, self.settle)

    def make(self, n: int) -> Buffer:
        if n > 100 * MANY:
            raise BackendError("there is no such memory")
        self.made.append(n)
        return Buffer(None, n)

    def settle(self) -> None:
        self.waits += 1


@pytest.fixture
def device() -> Device:
    return Device()


def test_the_same_sizes_are_used_again(device: Device) -> None:
    for _ in range(5):
        taken = [device.pool.take(n) for n in (3, 5, 3)]
        for buffer in taken:
            device.pool.give(buffer)
    assert device.made == [3, 5, 3]
    assert device.waits == 0
    assert device.pool.free_bytes == 4 * 11


def test_sizes_that_do_not_come_again_go_when_room_is_needed_the_oldest_first(device: Device) -> None:
    for n in (MANY, MANY + 1, MANY + 2):
        device.pool.give(device.pool.take(n))
    assert device.pool.free_bytes <= 4 * (MANY + 2) + SLACK_BYTES
    assert device.waits == 1
    device.made.clear()
    device.pool.give(device.pool.take(MANY + 2))
    assert device.made == []  # the youngest stayed
    device.pool.give(device.pool.take(MANY))
    assert device.made == [MANY]  # the oldest went


def test_all_memory_is_never_more_than_was_needed_at_once_and_the_slack(device: Device) -> None:
    draw = random.Random(0)
    held: list[Buffer] = []
    used = most = 0
    for _ in range(3000):
        if held and draw.random() < 0.5:
            buffer = held.pop(draw.randrange(len(held)))
            used -= 4 * buffer.floats
            device.pool.give(buffer)
        else:
            n = draw.randrange(1, MANY // 2)
            held.append(device.pool.take(n))
            used += 4 * n
            most = max(most, used)
        assert used + device.pool.free_bytes <= most + SLACK_BYTES


def test_trimmed_it_keeps_nothing_and_forgets_what_was_needed(device: Device) -> None:
    large = [device.pool.take(4 * MANY) for _ in range(3)]
    for buffer in large:
        device.pool.give(buffer)
    held = device.pool.take(7)
    device.pool.trim()
    assert device.pool.free_bytes == 0
    device.pool.give(device.pool.take(4 * MANY))
    device.pool.give(device.pool.take(4 * MANY + 1))
    assert device.pool.free_bytes <= 4 * (4 * MANY + 1 + 7) + SLACK_BYTES
    device.pool.give(held)


def test_memory_that_there_is_not_does_not_count(device: Device) -> None:
    with pytest.raises(BackendError, match="no such memory"):
        device.pool.take(200 * MANY)
    device.pool.give(device.pool.take(MANY))
    device.pool.give(device.pool.take(MANY + 1))
    device.pool.give(device.pool.take(MANY + 2))
    assert device.pool.free_bytes <= 4 * (MANY + 2) + SLACK_BYTES
