"""When a stage's compute thread counts as stalled."""

from collections.abc import Callable

import msgspec
import pytest

from coterie.planner.plan import Plan
from coterie.worker.stall import LEAST_S, TIMES, StallWatch, stall_limit_s


def test_only_looks_that_meet_the_same_block_one_after_the_other_add_up() -> None:
    watch = StallWatch(0.5)
    assert [watch.look((1, 7)) for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    assert watch.look((1, 8)) == 0.0, "it has come back"
    assert watch.look((1, 8)) == 0.5
    assert watch.look(None) == 0.0, "it waits for data"
    assert watch.look((1, 8)) == 0.0
    assert watch.look((2, 8)) == 0.0, "another plan's"


@pytest.mark.parametrize(("forward_s", "limit_s"), [(0.01, LEAST_S), (100.0, TIMES * 100.0)])
def test_slow_devices_have_longer(forward_s: float, limit_s: float, plan_of: Callable[..., Plan]) -> None:
    (stage,) = plan_of(("a", 0, 1)).stages
    assert stall_limit_s(msgspec.structs.replace(stage, forward_s=forward_s)) == limit_s
