"""Capacities from running times: seen soon, not disturbed by single steps, and never back and forth."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.ids import WorkerId
from coterie.planner import FixedStage, PlanRequest, make_plan
from coterie.planner.capacity import (
    DRIFT,
    FIRST_STEPS,
    WINDOW_STEPS,
    Capacities,
    StageTimes,
    WorkerPace,
    adopted,
    drifted,
    forgotten,
    judged,
    observe,
    rescaled,
)
from coterie.profiles.cluster_profile import UnitTiming

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
FACTORS = st.floats(0.2, 5.0)


@pytest.fixture(scope="module")
def request_(make_model, make_cluster):
    return PlanRequest(model=make_model(9), cluster=make_cluster((1.0, 1.0, 1.0)), batch_rows=8, micro_batches=4)


@pytest.fixture(scope="module")
def plan(request_):
    made = make_plan(request_)
    assert len(made.stages) == 3
    return made


def times(plan, factors):
    """What the stages report when each takes so many times its predicted seconds."""
    return tuple(
        StageTimes(worker=stage.worker, seconds=(stage.forward_s + stage.backward_s) * factors.get(stage.worker, 1.0))
        for stage in plan.stages
    )


def after(plan, *steps, capacities=None):
    capacities = Capacities() if capacities is None else capacities
    for factors in steps:
        capacities = observe(capacities, plan, times(plan, factors))
    return capacities


def steps_until_drift(plan, capacities, factors, steps_before):
    for step in range(1, 50):
        capacities = observe(capacities, plan, times(plan, factors))
        if drifted(capacities, plan, steps_since_plan=steps_before + step):
            return step, capacities
    return None, capacities


def test_devices_that_keep_their_times_have_factor_one_and_no_drift(plan):
    capacities = after(plan, *[{}] * 20)
    assert dict(capacities.factors) == {stage.worker: pytest.approx(1.0) for stage in plan.stages}
    assert not drifted(capacities, plan, steps_since_plan=20)


def test_nothing_is_judged_before_ten_steps(plan):
    capacities = after(plan, *[{W1: 3.0}] * FIRST_STEPS)
    assert not drifted(capacities, plan, steps_since_plan=FIRST_STEPS - 1)
    assert drifted(capacities, plan, steps_since_plan=FIRST_STEPS)


@pytest.mark.parametrize("steps_before", range(25))
def test_a_device_slowed_to_a_third_is_seen_within_ten_steps(plan, steps_before):
    capacities = after(plan, *[{}] * steps_before)
    step, capacities = steps_until_drift(plan, capacities, {W1: 3.0}, steps_before)
    assert step is not None
    assert step <= 10
    assert capacities.factor(W1) == pytest.approx(3.0)
    assert capacities.factor(W0) == pytest.approx(1.0)


def test_a_device_slowed_right_after_a_judgement_is_seen_within_ten_steps(plan):
    capacities = judged(after(plan, *[{W0: 1.5}] * 12))
    step, _ = steps_until_drift(plan, capacities, {W0: 1.5, W1: 3.0}, 12)
    assert step <= 10


@given(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3), st.integers(0, 20))
def test_three_steps_out_of_line_change_nothing(plan, outliers, at):
    capacities = Capacities()
    for step in range(40):
        factor = outliers[step - at] if at <= step < at + 3 else 1.0
        capacities = observe(capacities, plan, times(plan, {W1: factor}))
        assert not drifted(capacities, plan, steps_since_plan=step + 1)


@given(FACTORS, st.lists(st.floats(1.0, 1.0 + DRIFT), min_size=80, max_size=80))
def test_a_device_that_hovers_around_any_speed_is_judged_once_at_most(plan, level, wobble):
    capacities, judgements = Capacities(), 0
    for step, part in enumerate(wobble):
        capacities = observe(capacities, plan, times(plan, {W1: level * part}))
        if drifted(capacities, plan, steps_since_plan=step + 1):
            judgements += 1
            capacities = judged(capacities)
    assert judgements <= 1


@given(st.lists(FACTORS, min_size=60, max_size=60))
def test_however_the_times_jump_judgements_lie_a_window_apart(plan, factors):
    capacities, steps = Capacities(), []
    for step, factor in enumerate(factors):
        capacities = observe(capacities, plan, times(plan, {W1: factor}))
        if drifted(capacities, plan, steps_since_plan=step + 1):
            steps.append(step)
            capacities = judged(capacities)
    assert all(later - earlier >= WINDOW_STEPS for earlier, later in pairwise(steps))


def test_a_factor_stays_against_the_first_profile_when_a_plan_is_made_with_it(plan, request_):
    """The new plan's figures hold the factor already: measured over predicted is 1 from then on, the factor still 3."""
    capacities = after(plan, *[{W1: 3.0}] * 10)
    new = make_plan(msgspec.structs.replace(request_, cluster=rescaled(request_.cluster, capacities), version=2))
    capacities = adopted(capacities, capacities)
    capacities = after(new, *[{}] * 10, capacities=capacities)
    assert capacities.factor(W1) == pytest.approx(3.0)
    assert not drifted(capacities, new, steps_since_plan=10)
    recovered = after(new, *[{W1: 1 / 3}] * 10, capacities=capacities)
    assert recovered.factor(W1) == pytest.approx(1.0)
    assert drifted(recovered, new, steps_since_plan=20)


def test_the_factor_of_a_device_without_a_stage_stays(plan, request_):
    capacities = after(plan, *[{W1: 3.0}] * 10)
    cluster = rescaled(request_.cluster, capacities)
    others = tuple(device for device in cluster.devices if device.worker != W1)
    without = make_plan(
        msgspec.structs.replace(request_, cluster=msgspec.structs.replace(cluster, devices=others), version=2)
    )
    capacities = after(without, *[{}] * 20, capacities=adopted(capacities, capacities))
    assert capacities.factor(W1) == pytest.approx(3.0)
    assert not drifted(capacities, without, steps_since_plan=20)
    assert forgotten(capacities, W1).factor(W1) == 1.0


def test_long_rows_do_not_make_devices_slow(plan):
    capacities = Capacities()
    for _ in range(20):
        capacities = observe(capacities, plan, times(plan, {W0: 2.0, W1: 2.0, W2: 2.0}), load=2.0)
    assert dict(capacities.factors) == {worker: pytest.approx(1.0) for worker in (W0, W1, W2)}


def test_a_stage_that_nobody_waits_for_says_nothing_of_its_device_until_somebody_does(request_):
    ends = ((W0, 0, 1), (W1, 1, 8), (W2, 8, 11))
    stages = tuple(FixedStage(worker=worker, first_unit=first, stop_unit=stop) for worker, first, stop in ends)
    plan = make_plan(msgspec.structs.replace(request_, fixed_stages=stages))
    capacities = after(plan, *[{W0: 20.0}] * 20)  # an embedding with its overhead, far below the others' seconds
    assert capacities.factor(W0) == 1.0
    assert not drifted(capacities, plan, steps_since_plan=20)
    capacities = after(plan, *[{W0: 3000.0}] * 20)
    assert capacities.factor(W0) == pytest.approx(3000.0)
    assert drifted(capacities, plan, steps_since_plan=20)


def test_all_timings_of_a_slow_device_are_multiplied_and_those_of_others_are_not(request_):
    timing = UnitTiming(
        kind="block-a", forward_fixed_s=0.1, forward_per_row_s=0.2, backward_fixed_s=0.3, backward_per_row_s=0.4
    )
    devices = tuple(msgspec.structs.replace(device, timings=(timing,)) for device in request_.cluster.devices)
    cluster = msgspec.structs.replace(request_.cluster, devices=devices)
    capacities = Capacities(paces=(WorkerPace(worker=W1, factor=2.0),))
    slow = rescaled(cluster, capacities)
    assert slow.devices[0] == devices[0]
    assert slow.devices[2] == devices[2]
    assert slow.devices[1].timings[0] == UnitTiming(
        kind="block-a", forward_fixed_s=0.2, forward_per_row_s=0.4, backward_fixed_s=0.6, backward_per_row_s=0.8
    )
    assert slow.devices[1].flops_per_s == devices[1].flops_per_s / 2
    assert slow.devices[1].update_bytes_per_s == devices[1].update_bytes_per_s / 2
    assert slow.links == cluster.links
