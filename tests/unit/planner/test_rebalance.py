"""Another plan is worth its moving only if it gains more than it costs; and the sentence that says so."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.ids import WorkerId
from coterie.planner import FixedStage, PlanRequest, make_plan
from coterie.planner.capacity import Capacities, WorkerPace, rescaled
from coterie.planner.decide import repredicted
from coterie.planner.rebalance import LEAST_GAIN_S, SAFETY, LayerMove, UnitBytes, moves, unit_bytes, weigh
from coterie.units import MIB

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


@pytest.fixture(scope="module")
def request_(make_model, make_cluster):
    return PlanRequest(model=make_model(9), cluster=make_cluster((1.0, 1.0, 1.0)), batch_rows=8, micro_batches=4)


def cut(request_, *stages):
    """A plan with prescribed stages: (worker, first, stop)."""
    fixed = tuple(FixedStage(worker=worker, first_unit=first, stop_unit=stop) for worker, first, stop in stages)
    return make_plan(msgspec.structs.replace(request_, fixed_stages=fixed))


def taking(plan, seconds):
    return msgspec.structs.replace(plan, predicted_step_s=seconds)


@pytest.fixture(scope="module")
def even(request_):
    return cut(request_, (W0, 0, 4), (W1, 4, 8), (W2, 8, 11))


@pytest.fixture(scope="module")
def uneven(request_):
    return cut(request_, (W0, 0, 5), (W1, 5, 6), (W2, 6, 11))


def test_the_units_that_change_hands_are_named_with_both_ends(even, uneven):
    assert moves(even, uneven) == (
        LayerMove(unit=4, source=W1, target=W0),
        LayerMove(unit=6, source=W1, target=W2),
        LayerMove(unit=7, source=W1, target=W2),
    )
    assert moves(even, even) == ()


BYTES = tuple(UnitBytes(frozen_bytes=10 * MIB, trained_bytes=MIB) for _ in range(11))


def weighed(current, candidate, *, steps=100, rate=1.0 * MIB, rebuild_s=3.0):
    return weigh(
        current, candidate, remaining_steps=steps, moved_bytes_per_s=rate, unit_bytes=BYTES, rebuild_s=rebuild_s
    )


def test_gain_and_cost_are_what_arithmetic_says(even, uneven):
    result = weighed(taking(even, 4.0), taking(uneven, 3.0))
    assert result.gain_s == pytest.approx(100.0)
    # Three units' frozen tensors, all units' trained ones, the building, and one step.
    assert result.moved_bytes == 3 * 10 * MIB + 11 * MIB
    assert result.cost_s == pytest.approx(41.0 + 3.0 + 4.0)
    assert result.worth
    assert result.plan.stages == uneven.stages


def test_the_reason_is_one_line_with_the_numbers(even, uneven):
    reason = weighed(taking(even, 4.0), taking(uneven, 3.0)).reason
    assert reason == (
        "moving 3 layers (41.0 MiB sent) gives a step of 3 s instead of 4 s, saves 1 min 40 s in 100 steps and "
        "costs 48 s"
    )


def test_near_the_end_of_a_run_nothing_is_moved(even, uneven):
    assert not weighed(taking(even, 4.0), taking(uneven, 3.0), steps=50).worth
    assert not weighed(taking(even, 4.0), taking(uneven, 3.0), steps=0).worth


def test_a_step_that_is_hardly_shorter_is_not_worth_it_however_many_are_left(even, uneven):
    assert not weighed(taking(even, 4.0), taking(uneven, 3.95), steps=10**6).worth


def test_the_same_split_is_never_worth_it_and_says_that_nothing_is_better(even):
    result = weighed(taking(even, 4.0), taking(even, 1.0))
    assert not result.worth
    assert result.moved_bytes == 0
    assert result.reason == "no other split is better: a step takes 4 s"


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(0, 10**4), st.floats(1e4, 1e9), st.floats(0, 100))
def test_what_is_worth_it_gains_more_than_it_costs(even, uneven, now_s, then_s, steps, rate, rebuild_s):
    result = weighed(taking(even, now_s), taking(uneven, then_s), steps=steps, rate=rate, rebuild_s=rebuild_s)
    assert result.cost_s >= rebuild_s + now_s
    if result.worth:
        assert result.gain_s > SAFETY * result.cost_s + LEAST_GAIN_S


@given(st.integers(0, 10**4), st.integers(0, 10**4))
def test_more_steps_never_make_a_move_less_worth(even, uneven, steps, more):
    fewer, many = (weighed(taking(even, 4.0), taking(uneven, 3.0), steps=count) for count in (steps, steps + more))
    assert many.worth >= fewer.worth


def test_bytes_of_a_unit_count_trained_tensors_with_their_moments(make_model):
    model = make_model(1)
    assert unit_bytes(model, 2)[1] == UnitBytes(frozen_bytes=0, trained_bytes=3 * 28 * MIB)
    frozen = make_model(1, trained=False)
    assert unit_bytes(frozen, 2)[1] == UnitBytes(frozen_bytes=28 * MIB, trained_bytes=0)


def test_a_plan_that_stands_is_predicted_anew_for_other_speeds(request_, even):
    assert repredicted(even, request_) == even
    pace = WorkerPace(worker=W1, factor=3.0)
    slow = msgspec.structs.replace(request_, cluster=rescaled(request_.cluster, Capacities(paces=(pace,))))
    now = repredicted(even, slow)
    assert now.stages[1].forward_s == pytest.approx(3 * even.stages[1].forward_s)
    assert now.stages[0] == even.stages[0]
    assert now.predicted_step_s > 2 * even.predicted_step_s


def test_a_device_slowed_to_a_third_is_worth_moving_for_and_gives_most_of_its_layers_away(request_, even):
    pace = WorkerPace(worker=W1, factor=3.0)
    slow = msgspec.structs.replace(request_, cluster=rescaled(request_.cluster, Capacities(paces=(pace,))))
    current, candidate = repredicted(even, slow), make_plan(slow)
    result = weigh(
        current,
        candidate,
        remaining_steps=200,
        moved_bytes_per_s=1e8,
        unit_bytes=unit_bytes(request_.model, 2),
        rebuild_s=1.0,
    )
    assert result.worth
    sizes = {stage.worker: stage.stop_unit - stage.first_unit for stage in candidate.stages}
    assert sizes.get(W1, 0) <= 2
