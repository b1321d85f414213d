"""Devices whose backends share layers only where that is faster."""

import msgspec

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
    # With 3 rows 9 s against 8.5 s, with 4 rows 12 s against 10 s: less than a tenth is not enough.
    assert [profile.shares_at(rows) for rows in (1, 2, 3, 4)] == [False, False, False, True]
    assert profile.timing_of("block", 3) == ALONE
    assert profile.timing_of("block", 4) == SHARED
    assert profile.timing_of("output", 4) == HEAD
    assert profile.timing_of("unheard of", 4) is None
    assert profile.shared_memory_at(3) == SharedMemory()
    assert profile.shared_memory_at(4) == SharedMemory(copies=5, working=7)


def test_what_is_prescribed_is_shared_whatever_it_takes():
    prescribed = msgspec.structs.replace(device(SHARED), must_share=True)
    assert [prescribed.shares_at(rows) for rows in (1, 4)] == [True, True]


def test_nothing_is_shared_where_nothing_was_measured_shared():
    assert not device().shares_at(100)
    assert not device(UnitTiming(kind="unheard of")).shares_at(100)


def test_a_slower_device_shares_at_the_same_row_counts():
    slow = at_speed(device(SHARED), 0.25)
    assert [slow.shares_at(rows) for rows in (1, 2, 3, 4)] == [False, False, False, True]
    assert slow.timing_of("block", 4).forward_s(4) == 4 * SHARED.forward_s(4)
