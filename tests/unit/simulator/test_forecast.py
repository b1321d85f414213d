"""A plan on virtual devices: the plan's own prediction, idle time, bytes."""

import itertools

import pytest

from coterie.ids import WorkerId
from coterie.planner import PlanRequest, make_plan
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile
from coterie.profiles.model_profile import AffineBytes, LayerProfile, ModelProfile
from coterie.simulator import simulate_plan
from coterie.units import MIB


def request(*, devices: int = 2, tied: bool = False, **settings: object) -> PlanRequest:
    layers = tuple(
        LayerProfile(
            name=f"unit {number}",
            kind="unit",
            parameter_bytes=8 * MIB,
            trainable_bytes=8 * MIB,
            largest_trainable_bytes=MIB,
            saved=AffineBytes(per_row=MIB),
            boundary=AffineBytes(per_row=MIB),
            transient=AffineBytes(per_row=MIB),
            forward_flops_per_row=1e9,
            backward_flops_per_row=2e9,
        )
        for number in range(6)
    )
    workers = [WorkerId(f"w{number}") for number in range(devices)]
    cluster = ClusterProfile(
        devices=tuple(
            DeviceProfile(worker=worker, name=worker, memory_bytes=4000 * MIB, base_bytes=0, flops_per_s=1e9)
            for worker in workers
        ),
        links=tuple(
            LinkProfile(source=a, target=b, bytes_per_s=100 * MIB, latency_s=0.0)
            for a, b in itertools.permutations(workers, 2)
        ),
    )
    model = ModelProfile(
        key="k",
        name="m",
        layers=layers,
        tied=tied,
        tied_bytes=8 * MIB if tied else 0,
        memory_tokens=64,
        typical_tokens=32,
    )
    return PlanRequest(**{"model": model, "cluster": cluster, "batch_rows": 8, "micro_batches": 4, **settings})


@pytest.mark.parametrize("schedule", ["flush", "gpipe", "stash", "2bw", "forward"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_plan_makes_a_schedule_that_passes_the_check_within_its_depths(schedule, devices, tied):
    asked = request(devices=devices, tied=tied, schedule=schedule)
    forecast = simulate_plan(make_plan(asked), asked, steps=3)
    assert forecast.total_s > 0
    assert all(0 < stage.busy_share <= 1 + 1e-9 for stage in forecast.stages)


def test_a_flush_of_three_steps_takes_three_times_the_predicted_step():
    asked = request(tied=True)
    plan = make_plan(asked)
    assert simulate_plan(plan, asked, steps=3).total_s == pytest.approx(3 * plan.predicted_step_s)


def test_bytes_on_a_link_are_hidden_states_and_gradients_of_every_micro_batch():
    asked = request()
    forecast = simulate_plan(make_plan(asked), asked, steps=5)
    # 2 rows of 1 MiB at the memory length, half of it at the typical length, 4 micro-batches, 5 steps, two ways.
    assert [stage.sent_bytes for stage in forecast.stages] == [2 * 5 * 4 * MIB, 0]
