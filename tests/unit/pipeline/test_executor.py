import pytest
import torch
from torch import Tensor

from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import StageModule
from coterie.pipeline.executor import StageExecutor
from coterie.pipeline.executor_settings import ExecutorSettings
from coterie.pipeline.memory_ports import MemoryPipeline
from coterie.pipeline.micro_batch import MicroBatch, split_batch
from coterie.pipeline.optimizer import StageOptimizer
from coterie.pipeline.throttle import Throttle
from coterie.schedules import make_schedule


class TokenLoss:
    """Cross-entropy summed over labelled tokens."""

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def predictions(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


def _batch(step: int, micro_batch: int) -> MicroBatch:
    ids = torch.arange(12).view(3, 4)
    labels = torch.tensor([[0, 1, 2, -100], [-100] * 4, [1, 1, -100, -100]])
    parts = split_batch({"input_ids": ids}, labels, micro_batches=4, step=step, samples_seen=3 * step)
    return parts[micro_batch]


def _executor(
    stage: StageModule, links: MemoryPipeline, spec: OptimizerSpec, throttle: Throttle | None = None
) -> StageExecutor:
    settings = ExecutorSettings(seed=0, sends_gradient=False)
    return StageExecutor(stage, StageOptimizer(spec), TokenLoss(), links.ports(0), settings, throttle=throttle)


@pytest.mark.parametrize("kind", ["flush", "stash"])
def test_every_micro_batch_and_every_step_is_reported_once_with_its_tokens_and_rate(stage_of, kind: str) -> None:
    links = MemoryPipeline(1, _batch)
    spec = OptimizerSpec(learning_rate=0.5, warmup_samples=6)
    schedule = make_schedule(kind, stages=1, micro_batches=4, steps=2)
    _executor(stage_of(0, 4), links, spec).run_segment(schedule, 0, first_step=1)
    assert [(r.step, r.micro_batch, r.loss_tokens) for r in links.losses] == [
        (step, micro_batch, tokens) for step in (1, 2) for micro_batch, tokens in enumerate((3, 0, 2, 0))
    ]
    assert [report.loss_sum > 0 for report in links.losses] == [True, False, True, False] * 2
    assert [report.step for report in links.steps[0]] == [1, 2]
    rows_before_update = (3, 6) if kind == "flush" else (5, 8)
    expected = [spec.learning_rate_at(rows) for rows in rows_before_update]
    assert [report.learning_rate for report in links.steps[0]] == expected
    assert [report.updates for report in links.steps[0]] == [1 if kind == "flush" else 2] * 2
    assert all(min(r.forward_s, r.backward_s, r.update_s, r.cpu_s, r.grad_norm) > 0 for r in links.steps[0])


def test_a_throttled_stage_is_busy_longer_than_its_cpu_time(stage_of) -> None:
    links = MemoryPipeline(1, _batch)
    slept: list[float] = []
    executor = _executor(stage_of(0, 4), links, OptimizerSpec(), Throttle(0.1, sleep=slept.append))
    executor.run_segment(make_schedule("flush", stages=1, micro_batches=4), 0, first_step=0)
    report = links.steps[0][0]
    busy_s = report.forward_s + report.backward_s + report.update_s  # a preempted thread needs less sleep
    assert sum(slept) + busy_s > 9.5 * report.cpu_s


def test_what_the_port_gives_for_another_micro_batch_is_never_computed(stage_of) -> None:
    links = MemoryPipeline(1, lambda step, micro_batch: _batch(step + 1, micro_batch))
    with pytest.raises(AssertionError):
        _executor(stage_of(0, 4), links, OptimizerSpec()).run_segment(
            make_schedule("flush", stages=1, micro_batches=4), 0, first_step=0
        )
    assert links.losses == []
