"""What a stage does to save memory in mid-run changes no number: recomputing for a while, holding fewer in flight."""

from typing import Any

import pytest

from coterie.errors import OutOfMemoryError
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import StageModule
from coterie.pipeline.memory_ports import run_in_threads
from coterie.schedules import make_schedule

ADAMW = OptimizerSpec(learning_rate=1e-3, total_samples=10_000)
STEPS = 3


class Switching:
    """Micro-batches of a pipeline whose stages change their mind at every one of them, each at other times."""

    def __init__(self, lab: Any) -> None:
        self._make = lab.make_batch
        self._calls = 0
        self.executors: list[Any] = []

    def __call__(self, step: int) -> Any:
        self._calls += 1
        for number, executor in enumerate(self.executors):
            executor.recompute = bool((self._calls >> (number % 2)) & 1)
        return self._make(step)


@pytest.mark.parametrize(
    ("model", "kind"), [("bert", "flush"), ("bert", "stash"), ("bert_lora", "2bw"), ("llama", "flush")]
)
def test_a_stage_that_recomputes_some_micro_batches_gives_the_same_bits(
    lab: Any, monkeypatch: pytest.MonkeyPatch, model: str, kind: str
) -> None:
    case = getattr(lab, model)()
    plain = lab.Pipeline(case, case.cuts(3), ADAMW).run(kind, STEPS)
    switching = Switching(lab)
    seen: list[bool] = []
    forward = StageModule.forward

    def watched(*args: Any, recompute: bool = False, **named: Any) -> Any:
        seen.append(recompute)
        return forward(*args, recompute=recompute, **named)

    monkeypatch.setattr(StageModule, "forward", watched)
    adapting = lab.Pipeline(case, case.cuts(3), ADAMW, batches=switching)
    switching.executors = adapting.executors
    adapting.run(kind, STEPS)
    assert {True, False} == set(seen)
    assert adapting.losses == plain.losses
    assert lab.equal(adapting.parameters(), plain.parameters())


def test_a_stage_that_holds_no_more_in_flight_than_the_next_one_gives_the_same_bits(lab: Any) -> None:
    case = lab.bert()
    plain = lab.Pipeline(case, case.cuts(4), ADAMW).run("flush", STEPS)
    adapting = lab.Pipeline(case, case.cuts(4), ADAMW)
    planned, shallow = (4, 3, 2, 1), (4, 2, 2, 1)
    for step in range(STEPS):  # the others go on as planned: only the second stage knows
        schedules = [
            make_schedule("flush", stages=4, micro_batches=lab.micro_batches, in_flight=depths)
            for depths in (planned, shallow if step % 2 else planned, planned, planned)
        ]
        run_in_threads(
            adapting.links,
            lambda index: adapting.executors[index].run_segment(schedules[index], index, step),  # noqa: B023
            range(4),
        )
    assert adapting.losses == plain.losses
    assert lab.equal(adapting.parameters(), plain.parameters())


def test_a_forward_in_which_memory_runs_out_is_run_again_with_recomputation_to_the_same_bits(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = lab.bert()
    plain = lab.Pipeline(case, case.cuts(3), ADAMW).run("flush", STEPS)
    adapting = lab.Pipeline(case, case.cuts(3), ADAMW)
    forward = StageModule.forward
    middle = adapting.stages[1]
    failures = [3, 5]

    def scarce(stage: StageModule, *args: Any, recompute: bool = False, **named: Any) -> Any:
        output = forward(stage, *args, recompute=recompute, **named)
        if stage is middle and not recompute:
            failures[0] -= 1
            if failures[0] == 0:
                failures.pop(0)
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory")
        return output

    monkeypatch.setattr(StageModule, "forward", scarce)
    adapting.run("flush", STEPS)
    assert failures == [5]  # from then on nothing was kept that could run out
    assert [executor.recompute for executor in adapting.executors] == [False, True, False]
    assert adapting.losses == plain.losses
    assert lab.equal(adapting.parameters(), plain.parameters())


def test_memory_that_is_not_enough_for_recomputation_either_is_reported(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = lab.bert()
    pipeline = lab.Pipeline(case, case.cuts(2), ADAMW)

    def full(*_args: Any, **_named: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(StageModule, "forward", full)
    with pytest.raises(OutOfMemoryError, match="stage 0 ran out of memory"):
        pipeline.run("flush", 1)
