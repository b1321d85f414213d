"""What a run would do if a device slowed down, told before there is a run."""

import pytest

from coterie.ids import WorkerId
from coterie.planner import PlanRequest, make_plan
from coterie.planner.forecast import if_slower


@pytest.fixture(scope="module")
def request_(make_model, make_cluster):
    return PlanRequest(model=make_model(9), cluster=make_cluster((1.0, 1.0, 1.0)), batch_rows=8, micro_batches=4)


def test_a_slow_device_would_give_layers_away_where_enough_steps_are_left(request_):
    plan = make_plan(request_)
    slow = plan.stages[1].worker
    found = if_slower(plan, request_, slow, 3.0, remaining_steps=500)
    assert found.worth
    assert {move.source for move in found.moves} >= {slow}
    assert found.plan.version == plan.version + 1
    assert not if_slower(plan, request_, slow, 3.0, remaining_steps=1).worth


def test_a_device_that_stays_as_it_is_moves_nothing(request_):
    found = if_slower(make_plan(request_), request_, WorkerId("w0"), 1.0, remaining_steps=500)
    assert found.moves == ()
    assert not found.worth
