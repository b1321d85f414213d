"""When a stage's compute thread counts as stalled."""

import msgspec
import pytest

from coterie.planner.plan import MemoryEstimate, StageAssignment
from coterie.worker.stall import LEAST_S, TIMES, StallWatch, stall_limit_s

NO_MEMORY = MemoryEstimate(**dict.fromkeys(MemoryEstimate.__struct_fields__, 0))


def stage(forward_s: float) -> StageAssignment:
    found = dict.fromkeys(StageAssignment.__struct_fields__, 0)
    return msgspec.convert(
        found
        | {"worker": "a", "device_name": "a", "recompute": False, "allocator": "default", "send_codec": "fp32"}
        | {"memory": msgspec.to_builtins(NO_MEMORY), "forward_s": forward_s},
        StageAssignment,
    )


def test_only_looks_that_meet_the_same_block_one_after_the_other_add_up() -> None:
    watch = StallWatch(0.5)
    assert [watch.look((1, 7)) for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    assert watch.look((1, 8)) == 0.0, "it has come back"
    assert watch.look((1, 8)) == 0.5
    assert watch.look(None) == 0.0, "it waits for data"
    assert watch.look((1, 8)) == 0.0
    assert watch.look((2, 8)) == 0.0, "another plan's"


@pytest.mark.parametrize(("forward_s", "limit_s"), [(0.01, LEAST_S), (100.0, TIMES * 100.0)])
def test_slow_devices_have_longer(forward_s: float, limit_s: float) -> None:
    assert stall_limit_s(stage(forward_s)) == limit_s
