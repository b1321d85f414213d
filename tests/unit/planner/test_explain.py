"""What a person reads about a plan."""

import json

from coterie.planner import PlanRequest, explain, make_plan, plan_table
from coterie.units import name_units


def test_the_text_says_who_does_what_and_why(make_model, make_cluster):
    request = PlanRequest(
        model=make_model(7),
        cluster=make_cluster((1, 0.5, 0.25, 1), (5000, 5000, 5000, 120)),
        batch_rows=8,
        micro_batches=4,
    )
    plan = make_plan(request)
    text = explain(plan, request)
    for stage in plan.stages:
        assert stage.device_name in text
        assert name_units(stage.first_unit, stage.stop_unit, plan.units) in text
    assert "sets the pace" in text
    assert "Left out: device-3, cannot hold even one unit" in text
    assert "One device alone, the whole batch at once" in text
    assert "fp32" in text
    assert "schedule flush, 8 rows in 4 micro-batches, for" in text


def test_what_takes_memory_sums_to_the_peak(make_model, make_cluster):
    plan = make_plan(PlanRequest(model=make_model(6), cluster=make_cluster((1, 1)), batch_rows=8, schedule="2bw"))
    for row in plan_table(plan):
        parts = ("base", "weights", "gradients", "optimizer", "weight_versions", "activations", "transient", "buffers")
        assert sum(row[f"{part}_bytes"] for part in parts) == row["peak_bytes"]
        assert row["peak_bytes"] <= row["limit_bytes"]


def test_the_table_is_plain_data_for_json(make_model, make_cluster):
    plan = make_plan(PlanRequest(model=make_model(6), cluster=make_cluster((1, 1)), batch_rows=8, micro_batches=4))
    rows = json.loads(json.dumps(plan_table(plan)))
    assert [row["stage"] for row in rows] == [0, 1]
    assert rows[0]["send_codec"] == "fp32"
    assert rows[-1]["send_s"] is None


def test_a_plan_for_one_device_says_that_one_is_enough(make_model, make_cluster):
    request = PlanRequest(model=make_model(3), cluster=make_cluster((1,)), batch_rows=4)
    text = explain(make_plan(request), request)
    assert "one device alone is enough: device-0 takes" in text


def test_the_bottleneck_may_be_a_link(make_model, make_cluster):
    request = PlanRequest(
        model=make_model(4),
        cluster=make_cluster((100, 100), mbit_per_s=20),
        batch_rows=4,
        micro_batches=4,
        min_stages=2,
    )
    assert "the link after" in explain(make_plan(request), request)
