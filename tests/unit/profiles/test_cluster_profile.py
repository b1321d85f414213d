"""Devices whose backends share layers only where that is faster."""

from coterie.ids import WorkerId
from coterie.profiles.cluster_profile import DeviceProfile, SharedMemory, UnitTiming, at_speed

ALONE = UnitTiming(kind="block", forward_per_row_s=1.0, backward_per_row_s=2.0)
SHARED = UnitTiming(
    kind="block", forward_fixed_s=2.0, forward_per_row_s=0.5, backward_fixed_s=2.0, backward_per_row_s=1.0
)
HEAD = UnitTiming(kind="output", forward_per_row_s=7.0)


def device(*shared: UnitTiming) -> DeviceProfile:
    return DeviceProfile(
        worker=WorkerId("a"),
        name="a",
        memory_bytes=1 << 30,
        base_bytes=1 << 20,
        flops_per_s=1e9,
        timings=(ALONE, HEAD),
        shared_timings=shared,
        shared_memory=SharedMemory(copies=5, working=7),
    )


def test_layers_are_shared_from_the_row_count_on_at_which_that_is_faster():
    profile = device(SHARED)
    assert [profile.shares_at(rows) for rows in (1, 2, 3, 4)] == [False, False, True, True]
    assert profile.timing_of("block", 2) == ALONE
    assert profile.timing_of("block", 3) == SHARED
    assert profile.timing_of("output", 3) == HEAD
    assert profile.timing_of("unheard of", 3) is None
    assert profile.shared_memory_at(2) == SharedMemory()
    assert profile.shared_memory_at(3) == SharedMemory(copies=5, working=7)


def test_nothing_is_shared_where_nothing_was_measured_shared():
    assert not device().shares_at(100)
    assert not device(UnitTiming(kind="unheard of")).shares_at(100)


def test_a_slower_device_shares_at_the_same_row_counts():
    slow = at_speed(device(SHARED), 0.25)
    assert [slow.shares_at(rows) for rows in (1, 2, 3, 4)] == [False, False, True, True]
    assert slow.timing_of("block", 3).forward_s(3) == 4 * SHARED.forward_s(3)
