"""What a stage does when memory gets scarce, and when there is room again."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.cluster.fault_messages import MemoryLow
from coterie.cluster.messages import Assign
from coterie.ids import RunId, WorkerId
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.measure.budget import MemoryBudget
from coterie.planner.memory import MemorySettings, estimate_memory
from coterie.planner.plan import Plan, StageAssignment
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.model_profile import AffineBytes, LayerProfile, ModelProfile
from coterie.units import MIB
from coterie.worker.memory_watch import CALM_S, Rung, WatchState, decide, noticed, rungs_of

RUNGS = (
    Rung(recompute=False, in_flight=3, bytes=1000),
    Rung(recompute=True, in_flight=3, bytes=700),
    Rung(recompute=True, in_flight=2, bytes=600),
)
START = WatchState()


def limit(size: int) -> MemoryBudget:
    return MemoryBudget(bytes=size, why=f"{size} left")


def after(state: WatchState, size: int, now_s: float = 0.0, **more: int) -> tuple[WatchState, MemoryLow | None]:
    return decide(state, RUNGS, limit(size), now_s, **more)


def test_while_everything_fits_nothing_is_done() -> None:
    assert after(START, 1000) == (START, None)


def test_what_suffices_first_is_done_and_nobody_is_told() -> None:
    assert after(START, 999) == (WatchState(rung=1), None)
    assert after(WatchState(rung=1), 699) == (WatchState(rung=2), None)
    assert after(START, 600) == (WatchState(rung=2), None)


def test_when_nothing_suffices_the_coordinator_is_told_and_everything_is_done_meanwhile() -> None:
    state, told = after(START, 599)
    assert state == WatchState(rung=2, told_bytes=599)
    assert told == MemoryLow(limit_bytes=599, reason="599 left", recomputes=True)


def test_it_is_told_again_only_when_the_limit_has_fallen_by_a_tenth() -> None:
    state = WatchState(rung=2, told_bytes=590)
    assert after(state, 560) == (state, None)
    assert after(state, 520)[1] == MemoryLow(limit_bytes=520, reason="520 left", recomputes=True)


def test_it_climbs_only_with_room_to_spare_that_has_lasted() -> None:
    low = WatchState(rung=2)
    assert after(low, 1050) == (WatchState(rung=2, roomy_since_s=0.0), None)  # room for rung 1, not for rung 0
    waiting, _ = after(low, 1100, 5.0)
    assert waiting.roomy_since_s == 5.0
    assert after(waiting, 1100, 5.0 + CALM_S - 0.1) == (waiting, None)
    assert after(waiting, 1100, 5.0 + CALM_S) == (WatchState(rung=0), None)
    interrupted, _ = after(waiting, 610, 10.0)
    assert interrupted == WatchState(rung=2)


def test_what_a_stage_takes_beyond_its_prediction_is_counted() -> None:
    assert after(START, 1000, excess_bytes=50) == (WatchState(rung=1), None)


def test_more_memory_than_was_told_is_told_once_it_has_lasted_also_without_a_stage() -> None:
    state, told = decide(WatchState(told_bytes=500), (), limit(700), 0.0)
    assert (state.roomy_since_s, told) == (0.0, None)
    state, told = decide(state, (), limit(700), CALM_S)
    assert told == MemoryLow(limit_bytes=700, reason="700 left", recomputes=False)
    assert decide(state, (), limit(2000), 2 * CALM_S) == (WatchState(), None)


def test_a_stage_that_ran_short_by_surprise_is_on_the_rung_that_recomputes() -> None:
    assert noticed(START, RUNGS, recomputes=True) == WatchState(rung=1)
    assert noticed(START, RUNGS, recomputes=False) == START
    low = WatchState(rung=2)
    assert noticed(low, RUNGS, recomputes=True) is low
    assert noticed(START, RUNGS[:1], recomputes=True).rung == 0


@given(st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 60)), max_size=30))
def test_the_rung_always_fits_or_is_the_lowest_and_then_somebody_knows(steps: list[tuple[int, float]]) -> None:
    state, now_s = START, 0.0
    for size, seconds in steps:
        now_s += seconds
        state, _ = after(state, size, now_s)
        fits = RUNGS[state.rung].bytes <= size
        assert fits or (state.rung == 2 and state.told_bytes is not None)


def model() -> ModelProfile:
    block = LayerProfile(
        name="block",
        kind="block",
        largest_trainable_bytes=MIB,
        parameter_bytes=4 * MIB,
        trainable_bytes=MIB,
        saved=AffineBytes(per_row=20 * MIB),
        transient=AffineBytes(per_row=2 * MIB),
        fresh_transient=AffineBytes(per_row=2 * MIB),
        boundary=AffineBytes(per_row=MIB),
        forward_flops_per_row=1.0,
        backward_flops_per_row=2.0,
    )
    return ModelProfile(
        key="k", name="made up", layers=(block,) * 6, tied=False, tied_bytes=0, memory_tokens=8, typical_tokens=8
    )


def assign(schedule: Any = "flush", *, depths: tuple[int, ...] = (3, 2, 1), stage: int = 0, **place: Any) -> Assign:
    profile = model()
    stages = []
    for number, depth in enumerate(depths):
        estimate = estimate_memory(
            profile,
            (2 * number, 2 * number + 2),
            rows=2,
            in_flight=depth,
            settings=MemorySettings(schedule=schedule, allocator="tight", recompute=place.get("recompute", False)),
            base_bytes=300 * MIB,
        )
        stages.append(
            StageAssignment(
                stage=number,
                worker=WorkerId(f"w{number}"),
                device_name=f"w{number}",
                first_unit=2 * number,
                stop_unit=2 * number + 2,
                in_flight=depth,
                recompute=place.get("recompute", False),
                allocator="tight",
                send_codec="fp32",
                memory=estimate,
                memory_limit=1 << 40,
                forward_s=1.0,
                backward_s=2.0,
                update_s=0.1,
                send_s=0.1,
            )
        )
    plan = Plan(
        version=1,
        schedule=schedule,
        objective="time",
        batch_rows=8,
        micro_batches=4,
        units=6,
        stages=tuple(stages),
        left_out=(),
        predicted_step_s=1.0,
        one_device_step_s=1.0,
        one_device_peak=1,
    )
    return Assign(
        run=RunId("r"),
        plan=plan,
        stage=stage,
        spec=ModelSpec(config_json="{}", auto_class="AutoModel"),
        optimizer=OptimizerSpec(),
        task="token-classification",
        gradient_below=True,
        tied_peer=WorkerId(""),
    )


def test_a_stage_may_recompute_then_go_down_to_the_next_stages_depth() -> None:
    rungs = rungs_of(assign(), model(), SharedMemory())
    assert [(rung.recompute, rung.in_flight) for rung in rungs] == [(False, 3), (True, 3), (True, 2)]
    assert [rung.bytes for rung in rungs] == sorted((rung.bytes for rung in rungs), reverse=True)
    assert rungs[0].bytes == assign().plan.stages[0].memory.total
    # Of the two units only the second is a block: two micro-batches of two rows that wait keep 40 MiB of it each.
    assert rungs[0].bytes - rungs[1].bytes > 70 * MIB


def test_the_last_stage_holds_one_at_least() -> None:
    rungs = rungs_of(assign(stage=2), model(), SharedMemory())
    assert {rung.in_flight for rung in rungs} == {1}


@pytest.mark.parametrize("schedule", ["stash", "2bw"])
def test_where_the_depth_decides_about_numbers_it_stays_the_plans(schedule: str) -> None:
    rungs = rungs_of(assign(schedule), model(), SharedMemory())
    assert {rung.in_flight for rung in rungs} == {3}


def test_a_stage_that_recomputes_by_plan_has_only_depth_left() -> None:
    rungs = rungs_of(assign(recompute=True), model(), SharedMemory())
    assert [(rung.recompute, rung.in_flight) for rung in rungs] == [(True, 3), (True, 2)]


def test_without_the_models_profile_only_the_plans_way_is_known() -> None:
    assert len(rungs_of(assign(), None, SharedMemory())) == 1
