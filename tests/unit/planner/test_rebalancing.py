"""A made-up run step by step: a device changes its speed, and the plan follows, once, as far as it pays."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.ids import WorkerId
from coterie.planner import FixedStage, PlanRequest, make_plan
from coterie.planner.capacity import (
    Capacities,
    StageTimes,
    WorkerPace,
    adopted,
    drifted,
    judged,
    observe,
    rescaled,
)
from coterie.planner.decide import repredicted
from coterie.planner.rebalance import unit_bytes, weigh

STEPS = 300


class Run:
    """What a coordinator does with the pure functions, and devices that take the seconds they are told to."""

    def __init__(self, request, seed):
        self.request = request
        self.plan = make_plan(request)
        self.capacities = Capacities()
        self.true = Capacities()
        self.plans = [(0, self.plan)]
        self._real = self.plan
        self.step = self.steps_of_plan = 0
        self._noise = random.Random(seed)

    def set_speed(self, worker, factor):
        self.set_speeds({worker: factor})

    def set_speeds(self, factors):
        self.true = Capacities(paces=tuple(WorkerPace(worker=name, factor=factor) for name, factor in factors.items()))
        self._real = self.really(self.plan)

    def advance(self):
        times = tuple(
            StageTimes(
                worker=stage.worker, seconds=(stage.forward_s + stage.backward_s) * self._noise.uniform(0.9, 1.1)
            )
            for stage in self._real.stages
        )
        self.capacities = observe(self.capacities, self.plan, times)
        self.step += 1
        self.steps_of_plan += 1
        if drifted(self.capacities, self.plan, steps_since_plan=self.steps_of_plan):
            self._consider()

    def _consider(self):
        keep = tuple(
            FixedStage(worker=stage.worker, first_unit=stage.first_unit, stop_unit=stage.stop_unit)
            for stage in self.plan.stages
        )
        cluster = rescaled(self.request.cluster, self.capacities)
        request = msgspec.structs.replace(self.request, cluster=cluster, keep=keep, version=self.plan.version + 1)
        self.capacities = judged(self.capacities)
        found = weigh(
            repredicted(self.plan, request),
            make_plan(request),
            remaining_steps=STEPS - self.step,
            moved_bytes_per_s=50e6,
            unit_bytes=unit_bytes(request.model, 2),
            rebuild_s=2.0,
        )
        if found.worth:
            self.plan, self.steps_of_plan = found.plan, 0
            self.capacities = adopted(self.capacities, self.capacities)
            self.plans.append((self.step, self.plan))
            self._real = self.really(self.plan)

    def really(self, plan):
        """A plan's figures at the devices' true speeds."""
        return repredicted(plan, self._at_true_speeds())

    @property
    def best_s(self):
        """What the planner says is possible now."""
        return make_plan(self._at_true_speeds()).predicted_step_s

    def _at_true_speeds(self):
        return msgspec.structs.replace(self.request, cluster=rescaled(self.request.cluster, self.true))


@pytest.fixture(scope="module")
def start(make_model, make_cluster):
    def make(speeds, seed=0):
        model = make_model(12, trained=False)
        request = PlanRequest(
            model=model, cluster=make_cluster(speeds), batch_rows=8, micro_batches=4, schedule="flush"
        )
        return Run(request, seed)

    return make


@settings(max_examples=12)
@given(
    speeds=st.lists(st.sampled_from([0.7, 1.0, 1.3, 2.0]), min_size=3, max_size=4),
    slowed=st.integers(0, 3),
    at=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_throughput_is_back_at_85_percent_of_the_possible_within_30_steps(start, speeds, slowed, at, seed):
    run = start(tuple(speeds), seed)
    for _ in range(at):
        run.advance()
    assert len(run.plans) == 1, "nothing moves before"
    run.set_speed(WorkerId(f"w{slowed % len(speeds)}"), 3.0)
    for _ in range(30):
        run.advance()
    assert run.really(run.plan).predicted_step_s <= run.best_s / 0.85
    moved = len(run.plans)
    for _ in range(60):
        run.advance()
    assert len(run.plans) == moved, "nothing moves back and forth"


def test_a_device_that_recovers_gets_its_layers_back(start):
    run = start((1.0, 1.0, 1.0))
    run.set_speed(WorkerId("w1"), 2.0)
    for _ in range(40):
        run.advance()
    assert len(run.plans) == 2
    run.set_speed(WorkerId("w1"), 1.0)
    for _ in range(30):
        run.advance()
    assert len(run.plans) == 3
    assert run.really(run.plan).predicted_step_s <= run.best_s / 0.85


def test_what_slows_all_devices_alike_moves_nothing(start):
    run = start((1.0, 1.0, 1.0))
    run.set_speeds({WorkerId(f"w{number}"): 2.0 for number in range(3)})
    for _ in range(60):
        run.advance()
    assert len(run.plans) == 1


def test_a_device_that_is_slow_for_a_few_steps_only_keeps_its_layers(start):
    run = start((1.0, 1.0, 1.0))
    for step in range(120):
        run.set_speed(WorkerId("w1"), 4.0 if step % 40 in (20, 21, 22) else 1.0)
        run.advance()
    assert len(run.plans) == 1


def test_near_the_end_nothing_is_moved_any_more(start):
    run = start((1.0, 1.0, 1.0))
    run.step = STEPS - 12
    run.set_speed(WorkerId("w1"), 1.4)
    for _ in range(12):
        run.advance()
    assert len(run.plans) == 1
