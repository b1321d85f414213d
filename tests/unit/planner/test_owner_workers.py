"""Where token ids and labels must not leave their owner's machine: both ends on its workers, and the best plan so."""

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from coterie.errors import DoesNotFitError, RecipeError
from coterie.ids import WorkerId
from coterie.planner import FixedStage, PlanRequest, make_plan
from coterie.planner.problem import Problem
from coterie.planner.reach import MemoryReach
from coterie.planner.search import TimeSearch
from coterie.planner.tables import Tables, memory_limits

W = tuple(WorkerId(f"w{number}") for number in range(12))


@pytest.fixture(scope="module")
def ask(make_model, make_cluster):
    def make(speeds, owners, memory_mib=None, **settings_):
        cluster = make_cluster(speeds, memory_mib)
        return PlanRequest(
            **{
                "model": make_model(12),
                "cluster": cluster,
                "batch_rows": 8,
                "micro_batches": 4,
                "owner_workers": owners,
                **settings_,
            }
        )

    return make


def ends(plan):
    return {plan.stages[0].worker, plan.stages[-1].worker}


def test_both_ends_are_on_the_owners_workers_and_others_in_the_middle(ask):
    plan = make_plan(ask((1.0, 1.0, 1.0, 1.0), (W[1], W[3])))
    assert ends(plan) == {W[1], W[3]}
    assert {stage.worker for stage in plan.stages[1:-1]} == {W[0], W[2]}
    assert "token ids and labels stay on device-1 and device-3" in " ".join(plan.notes) or (
        "token ids and labels stay on device-3 and device-1" in " ".join(plan.notes)
    )


def test_slow_workers_of_the_owner_hold_little_more_than_the_ends(ask):
    plan = make_plan(ask((0.05, 1.0, 1.0, 0.05), (W[0], W[3])))
    assert ends(plan) == {W[0], W[3]}
    assert [stage.stop_unit - stage.first_unit for stage in (plan.stages[0], plan.stages[-1])] == [1, 1]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["flush", "gpipe", "stash", "2bw", "forward"]),
    micro_batches=st.sampled_from([1, 2, 4]),
    owned=st.sets(st.integers(0, 3), min_size=1, max_size=3),
)
def test_the_plan_is_the_fastest_of_all_whose_ends_are_there(
    random_request, all_candidates, textbook_depths, seed, kind, micro_batches, owned
):
    request = random_request(seed, schedule=kind, allow_recompute=False, codecs=("fp32",))
    owners = tuple(device.worker for number, device in enumerate(request.cluster.devices) if number in owned)
    assume(owners)
    problem = Problem(msgspec.structs.replace(request, owner_workers=owners), micro_batches)
    limits = memory_limits(problem)
    found = TimeSearch(Tables(problem), "textbook", limits).fastest()
    permitted = [
        problem.cost(stages)
        for stages in all_candidates(problem, textbook_depths)
        if {problem.devices[stage.device].worker for stage in (stages[0], stages[-1])} <= set(owners)
    ]
    best = min((cost.step_s for cost in permitted if cost.fits), default=None)
    assert (found is None) == (best is None)
    assert MemoryReach(Tables(problem), "textbook").fits(limits) == (best is not None)
    if found is not None:
        assert found.cost.step_s == pytest.approx(best, rel=3e-6)


def test_one_worker_of_the_owner_takes_all_or_nothing_fits(ask):
    assert [stage.worker for stage in make_plan(ask((1.0, 1.0), (W[0],))).stages] == [W[0]]
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(ask((1.0, 1.0, 1.0), (W[0],), (400, 2000, 2000), allow_recompute=False))
    assert "let any device hold the first and the last layer" in caught.value.hint


def test_without_any_of_the_owners_workers_no_plan_is_made(ask):
    with pytest.raises(RecipeError, match="none of the devices that own the data is there"):
        make_plan(ask((1.0, 1.0), (W[7],)))


def test_prescribed_stages_with_an_end_elsewhere_are_refused(ask):
    stages = (FixedStage(worker=W[0], first_unit=0, stop_unit=4), FixedStage(worker=W[1], first_unit=4, stop_unit=14))
    with pytest.raises(RecipeError, match="not both on devices that own the data"):
        make_plan(ask((1.0, 1.0, 1.0), (W[0], W[2]), fixed_stages=stages))
    assert ends(make_plan(ask((1.0, 1.0, 1.0), (W[0], W[1]), fixed_stages=stages))) == {W[0], W[1]}


def test_of_more_devices_than_are_looked_at_the_owners_are_never_left_out(ask):
    speeds = (0.1, 0.1, *itertools.repeat(1.0, 10))
    assert ends(make_plan(ask(speeds, (W[0], W[1])))) <= {W[0], W[1]}


def test_a_new_plan_that_stays_near_the_one_that_stands_keeps_the_ends_too(ask):
    request = ask((1.0, 1.0, 1.0, 1.0), (W[1], W[3]))
    standing = tuple(
        FixedStage(worker=worker, first_unit=first, stop_unit=stop)
        for worker, (first, stop) in zip((W[0], W[1], W[2], W[3]), itertools.pairwise((0, 4, 7, 11, 14)), strict=True)
    )
    assert ends(make_plan(msgspec.structs.replace(request, keep=standing))) == {W[1], W[3]}
