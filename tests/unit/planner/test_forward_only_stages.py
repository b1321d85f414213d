"""What is trained ends somewhere: stages below it get no gradient, and plans, reasons and forecasts know that."""

import itertools

import msgspec
import pytest

from coterie.ids import WorkerId
from coterie.planner import FixedStage, PlanRequest, explain, make_plan
from coterie.planner.problem import Problem, StageChoice
from coterie.planner.shortfall import does_not_fit
from coterie.profiles.cluster_profile import LinkProfile
from coterie.profiles.model_profile import AffineBytes
from coterie.simulator.forecast import simulate_plan
from coterie.units import MIB


def frozen_below(model, unit):
    """The model with nothing trained before `unit`: no backward, nothing saved."""
    below = [
        msgspec.structs.replace(layer, trainable_bytes=0, saved=AffineBytes(), backward_flops_per_row=0.0)
        for layer in model.layers[:unit]
    ]
    return msgspec.structs.replace(model, layers=(*below, *model.layers[unit:]))


def with_slow_way_back(cluster, bytes_per_s):
    """Every link from a later device to an earlier one is slow."""
    links = tuple(
        msgspec.structs.replace(link, bytes_per_s=bytes_per_s) if link.source > link.target else link
        for link in cluster.links
    )
    return msgspec.structs.replace(cluster, links=links)


def fixed(*edges):
    return tuple(
        FixedStage(worker=WorkerId(f"w{number}"), first_unit=first, stop_unit=stop)
        for number, (first, stop) in enumerate(itertools.pairwise(edges))
    )


@pytest.mark.parametrize("schedule", ["flush", "gpipe", "stash", "2bw"])
def test_the_way_back_costs_nothing_below_what_is_trained(make_model, make_cluster, schedule):
    model = frozen_below(make_model(4), 4)
    fast = make_cluster((1, 1))
    slow = with_slow_way_back(fast, 1e5)
    times = {
        (name, cut): make_plan(
            PlanRequest(model=model, cluster=cluster, batch_rows=8, micro_batches=4, schedule=schedule,
                        fixed_stages=fixed(0, cut, 6))
        ).predicted_step_s
        for name, cluster in (("fast", fast), ("slow", slow))
        for cut in (4, 5)
    }  # fmt: skip
    assert times["slow", 4] == times["fast", 4]
    assert times["slow", 5] > 2 * times["fast", 5]


def test_blocks_without_a_backward_go_to_the_slow_device_in_greater_number(make_model, make_cluster):
    cluster = make_cluster((1, 1))

    def first_stage(model):
        plan = make_plan(PlanRequest(model=model, cluster=cluster, batch_rows=8, micro_batches=8, min_stages=2))
        return plan.stages[0].stop_unit - 1

    assert first_stage(make_model(12)) == 6
    # Nine blocks run forward only (1 each), three also backward (3 each): nine of eighteen on either side.
    assert first_stage(frozen_below(make_model(12), 10)) == 9


def test_recomputation_costs_no_second_forward_below_what_is_trained(make_model, make_cluster):
    request = PlanRequest(
        model=frozen_below(make_model(4), 3), cluster=make_cluster((1, 1)), batch_rows=8, require_recompute=True
    )
    problem = Problem(request, 4)

    def backward_s(first, stop, *, recompute):
        choice = StageChoice(device=0, first_unit=first, stop_unit=stop, depth=1, recompute=recompute)
        return problem.compute_s(choice)[1]

    assert backward_s(0, 3, recompute=True) == 0
    block_s = problem.forward_s[0, 3]
    assert backward_s(1, 5, recompute=True) - backward_s(1, 5, recompute=False) == pytest.approx(2 * block_s)


def test_the_plan_says_who_runs_forward_only(make_model, make_cluster):
    request = PlanRequest(
        model=frozen_below(make_model(4), 5), cluster=make_cluster((1, 1, 1)), batch_rows=8, micro_batches=4,
        fixed_stages=fixed(0, 2, 4, 6),
    )  # fmt: skip
    plan = make_plan(request)
    assert "device-0, device-1 run forward only: nothing is trained there or before" in plan.notes
    text = explain(plan, request)
    assert text.count(" forward only  ") == 2
    assert [stage.backward_s == 0 for stage in plan.stages] == [True, True, False]
    assert not any("forward only" in note for note in make_plan(
        msgspec.structs.replace(request, model=make_model(4))).notes)  # fmt: skip


def test_a_forecast_counts_gradients_only_where_they_are_sent(make_model, make_cluster):
    request = PlanRequest(
        model=frozen_below(make_model(4), 2), cluster=make_cluster((1, 1, 1)), batch_rows=8, micro_batches=4,
        fixed_stages=fixed(0, 2, 4, 6),
    )  # fmt: skip
    plan = make_plan(request)
    below, above, _ = simulate_plan(plan, request, steps=3).stages
    assert above.sent_bytes == 2 * below.sent_bytes > 0


def test_a_slow_link_is_hidden_below_what_is_trained_without_any_memory(make_model, make_cluster):
    cluster = make_cluster((1, 1))
    links = tuple(
        LinkProfile(source=link.source, target=link.target, bytes_per_s=link.bytes_per_s, latency_s=2.0)
        for link in cluster.links
    )
    request = PlanRequest(
        model=frozen_below(make_model(4), 5), cluster=msgspec.structs.replace(cluster, links=links), batch_rows=32,
        micro_batches=16, schedule="stash", fixed_stages=fixed(0, 4, 6), allocator="tight",
    )  # fmt: skip
    plan = make_plan(request)
    assert plan.stages[0].in_flight > 2
    assert plan.stages[0].memory.activations == 0
    assert not any("to hide a slow link" in note for note in plan.notes)


def test_freezing_the_embeddings_is_known_to_save_their_backward_too(make_model, make_cluster):
    model = make_model(2)
    layers = (msgspec.structs.replace(model.layers[0], saved=AffineBytes(per_row=200 * MIB)), *model.layers[1:])
    request = PlanRequest(
        model=msgspec.structs.replace(model, layers=layers), cluster=make_cluster((1,), (450,)), batch_rows=1
    )
    assert "freeze the embeddings" in does_not_fit(request).hint
