"""How often what is trained is copied."""

from itertools import pairwise

import msgspec
import pytest

from coterie.coordinator.replication import (
    LOCAL_BYTES_PER_S,
    MOST_PART,
    SMALL_BYTES,
    USUAL_BYTES_PER_S,
    replicate_every,
)
from coterie.ids import WorkerId
from coterie.planner.plan import MemoryEstimate, Plan, StageAssignment
from coterie.planner.rebalance import UnitBytes
from coterie.units import GIB, MIB

NOTHING = MemoryEstimate(
    base=0, weights=0, gradients=0, optimizer=0, weight_versions=0, activations=0, transient=0, buffers=0
)


def plan(*edges, step_s=1.0):
    stages = tuple(
        StageAssignment(
            stage=number,
            worker=WorkerId(f"device-{number}"),
            device_name=f"device-{number}",
            first_unit=first,
            stop_unit=stop,
            in_flight=1,
            recompute=False,
            allocator="default",
            send_codec="fp32",
            memory=NOTHING,
            memory_limit=GIB,
            forward_s=0.1,
            backward_s=0.1,
            update_s=0.0,
            send_s=0.0,
        )
        for number, (first, stop) in enumerate(pairwise(edges))
    )
    return Plan(
        version=1,
        schedule="flush",
        objective="time",
        batch_rows=4,
        micro_batches=2,
        units=edges[-1],
        stages=stages,
        left_out=(),
        predicted_step_s=step_s,
        one_device_step_s=1.0,
        one_device_peak=1,
    )


def units(*trained_bytes):
    return tuple(UnitBytes(frozen_bytes=0, trained_bytes=size) for size in trained_bytes)


def test_little_is_copied_after_every_step():
    assert replicate_every(plan(0, 1, 2), units(SMALL_BYTES // 2, SMALL_BYTES // 2), wanted=0, free_bytes=GIB) == 1


@pytest.mark.parametrize("step_s", [0.5, 2.0, 100.0])
def test_much_is_copied_so_seldom_that_the_largest_stage_sends_for_a_small_part_of_the_time(step_s):
    sizes = units(100 * MIB, 20 * MIB, 60 * MIB)
    steps = replicate_every(plan(0, 1, 3, step_s=step_s), sizes, wanted=0, free_bytes=8 * GIB)
    sending_s = 100 * MIB / USUAL_BYTES_PER_S
    assert sending_s <= MOST_PART * steps * step_s
    assert steps == 1 or sending_s > MOST_PART * (steps - 1) * step_s


def test_the_recipe_decides_where_it_does():
    assert replicate_every(plan(0, 1), units(100 * MIB), wanted=7, free_bytes=8 * GIB) == 7


def test_what_the_coordinator_cannot_hold_is_not_copied():
    assert replicate_every(plan(0, 1), units(100 * MIB), wanted=7, free_bytes=500 * MIB) == 0


def test_a_plan_that_says_nothing_of_its_time_is_no_division_by_zero():
    free = plan(0, 1, step_s=0.0)
    assert replicate_every(msgspec.structs.replace(free), units(100 * MIB), wanted=0, free_bytes=8 * GIB) > 1


def test_what_need_not_cross_a_network_is_copied_more_often():
    sizes = units(100 * MIB, 60 * MIB)
    near, far = (
        replicate_every(plan(0, 1, 2), sizes, wanted=0, free_bytes=8 * GIB, bytes_per_s=rate)
        for rate in (LOCAL_BYTES_PER_S, USUAL_BYTES_PER_S)
    )
    assert 1 <= near < far / 10
