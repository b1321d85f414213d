"""The search against plain enumeration, with the same cost functions: equal to rounding, for everything at once."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from coterie.planner.problem import Problem
from coterie.planner.reach import MemoryReach
from coterie.planner.search import TimeSearch
from coterie.planner.tables import Tables, memory_limits

KINDS = ["flush", "gpipe", "stash", "2bw", "forward"]
SEARCHES = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def few_enough(problem: Problem, ways_at: dict[int, int]) -> bool:
    """Can all candidates be enumerated in a moment? `ways_at`: most options per stage by number of devices."""
    ways = len(problem.request.codecs) * (2 if problem.request.allow_recompute else 1)
    return ways <= ways_at.get(len(problem.devices), 0)


@SEARCHES
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    micro_batches=st.sampled_from([1, 2, 3, 4, 8]),
    copies=st.sampled_from([0, 2]),
)
@example(seed=46128, kind="stash", micro_batches=3, copies=0)  # a bound that lands on the lower end: no end once
def test_the_fastest_plan_is_the_fastest_of_all_that_fit(
    random_request, all_candidates, textbook_depths, seed, kind, micro_batches, copies
):
    problem = Problem(random_request(seed, schedule=kind, optimizer_state_copies=copies), micro_batches)
    assume(few_enough(problem, {1: 6, 2: 6, 3: 2, 4: 1}))
    found = TimeSearch(Tables(problem), "textbook", memory_limits(problem)).fastest()
    costs = map(problem.cost, all_candidates(problem, textbook_depths))
    best = min((cost.step_s for cost in costs if cost.fits), default=None)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.cost.fits
        assert found.cost.step_s == pytest.approx(best, rel=3e-6)


@SEARCHES
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["flush", "stash", "2bw"]),
    mode=st.sampled_from(["deeper", "shallower"]),
)
def test_with_free_depths_the_plan_is_the_fastest_of_all_depths(random_request, all_candidates, seed, kind, mode):
    problem = Problem(random_request(seed, schedule=kind, allow_recompute=False), 4)
    assume(few_enough(problem, {1: 6, 2: 3}))

    def depths(_: Problem, stages: int):
        deepest = 4 if kind != "stash" else 6
        for chosen in itertools.product(range(1, deepest + 1), repeat=stages):
            falling = all(a >= b for a, b in itertools.pairwise(chosen))
            if falling and (
                mode == "shallower" or all(d >= min(k, 4) for d, k in zip(chosen, range(stages, 0, -1), strict=True))
            ):
                yield chosen

    found = TimeSearch(Tables(problem), mode, memory_limits(problem)).fastest()
    costs = map(problem.cost, all_candidates(problem, depths))
    best = min((cost.step_s for cost in costs if cost.fits), default=None)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.cost.fits
        # Enumeration stops at a depth where the search does not.
        assert found.cost.step_s <= best * (1 + 3e-6)
        if max(stage.depth for stage in found.stages) <= 4:
            assert found.cost.step_s == pytest.approx(best, rel=3e-6)
        assert all(a.depth >= b.depth for a, b in itertools.pairwise(found.stages))


@SEARCHES
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), micro_batches=st.sampled_from([1, 2, 8]))
def test_the_least_peak_is_the_least_of_all(random_request, all_candidates, textbook_depths, seed, kind, micro_batches):
    problem = Problem(random_request(seed, schedule=kind, codecs=("fp32",)), micro_batches)
    assume(few_enough(problem, {1: 6, 2: 6, 3: 2, 4: 1}))
    least = MemoryReach(Tables(problem), "textbook").least_peak(memory_limits(problem))
    costs = [problem.cost(candidate) for candidate in all_candidates(problem, textbook_depths)]
    assert least == min((max(cost.peaks_above_base) for cost in costs if cost.fits), default=None)


@SEARCHES
@given(seed=st.integers(0, 10**6), micro_batches=st.sampled_from([1, 4]))
def test_the_least_addition_is_just_enough(random_request, seed, micro_batches):
    problem = Problem(random_request(seed), micro_batches)
    limits = memory_limits(problem)
    reach = MemoryReach(Tables(problem), "textbook")
    addition = reach.least_addition(limits)
    assert reach.fits(limits + addition)
    assert not reach.fits(limits + addition - 1)
    assert reach.fits(limits) == (addition <= 0)


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS))
@settings(max_examples=10, deadline=None)
def test_no_plan_beats_the_bound_that_rules_searches_out(random_request, seed, kind):
    problem = Problem(random_request(seed, schedule=kind), 4)
    search = TimeSearch(Tables(problem), "textbook", np.full(len(problem.devices), 10**15))
    for most in range(1, search.most + 1):
        found = search.fastest(most=most)
        assert found is not None
        assert found.cost.step_s >= search.lowest_step_s(most) * (1 - 1e-9)
