"""Copies of the trained state in mid-run: what is handed out after a step is the state of that step, bit for bit."""

import pytest
import torch

from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.pipeline.executor import StageExecutor
from coterie.pipeline.executor_settings import ExecutorSettings
from coterie.pipeline.memory_ports import MemoryPipeline, run_in_threads
from coterie.pipeline.micro_batch import split_batch
from coterie.pipeline.optimizer import StageOptimizer
from coterie.schedules import make_schedule

MICRO_BATCHES = 4
STEPS = 3
CUTS = ((0, 2), (2, 4))


class TokenLoss:
    """Cross-entropy summed over labelled tokens."""

    def loss_sum(self, logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def predictions(self, logits):
        return logits.argmax(-1)


class Copies:
    """Keeps a copy of each step's state, and counts the warnings before updates."""

    def __init__(self):
        self.of = {}
        self.updates = 0

    def before_update(self):
        self.updates += 1

    def after_step(self, steps_done, parameters, state):
        assert steps_done not in self.of
        self.of[steps_done] = flat(parameters, state)


def flat(parameters, state):
    tensors = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, fields in state.items():
        tensors |= {f"{name}/{field}": tensor.clone() for field, tensor in fields.items()}
    return tensors


def batch(step, micro_batch):
    ids = (torch.arange(20).view(4, 5) + step) % 20
    labels = torch.where(ids % 5 == 0, -100, ids % 3)
    if step == 1:
        labels[2:] = -100  # micro-batches without anything to learn from
    return split_batch({"input_ids": ids}, labels, micro_batches=MICRO_BATCHES, step=step, samples_seen=4 * step)[
        micro_batch
    ]


def run(stage_of, kind, steps, takers=None):
    """The final state of both stages."""
    pipeline = MemoryPipeline(2, batch)
    spec = OptimizerSpec(learning_rate=0.05)
    stages = [stage_of(*cut) for cut in CUTS]
    optimizers = [StageOptimizer(spec) for _ in CUTS]

    def run_stage(index):
        settings = ExecutorSettings(seed=0, sends_gradient=index > 0)
        StageExecutor(
            stages[index],
            optimizers[index],
            TokenLoss(),
            pipeline.ports(index),
            settings,
            taker=takers[index] if takers else None,
        ).run_segment(make_schedule(kind, stages=2, micro_batches=MICRO_BATCHES, steps=steps), index, first_step=0)

    run_in_threads(pipeline, run_stage, range(2))
    return [flat(stages[index].trainable(), optimizers[index].state()) for index in range(2)]


@pytest.mark.parametrize("kind", ["flush", "gpipe", "stash", "2bw"])
def test_after_each_step_the_state_is_what_a_run_that_ends_there_has(stage_of, kind):
    takers = [Copies(), Copies()]
    run(stage_of, kind, STEPS, takers)
    for steps in range(1, STEPS + 1):
        for taker, expected in zip(takers, run(stage_of, kind, steps), strict=True):
            assert set(taker.of) == set(range(1, STEPS + 1))
            assert expected.keys() == taker.of[steps].keys()
            assert all(torch.equal(taker.of[steps][name], expected[name]) for name in expected)
    first, last = (takers[0].of[steps] for steps in (1, STEPS))
    assert any(not torch.equal(first[name], last[name]) for name in first), "nothing was trained at all"


@pytest.mark.parametrize("kind", ["flush", "stash"])
def test_each_update_is_announced_and_a_copy_makes_no_difference(stage_of, kind):
    takers = [Copies(), Copies()]
    watched = run(stage_of, kind, STEPS, takers)
    plain = run(stage_of, kind, STEPS)
    for with_copies, without in zip(watched, plain, strict=True):
        assert all(torch.equal(with_copies[name], without[name]) for name in without)
    updates = STEPS if kind == "flush" else STEPS * MICRO_BATCHES - 2  # two micro-batches hold nothing to learn from
    assert [taker.updates for taker in takers] == [updates, updates]


def test_an_evaluation_hands_out_nothing(stage_of):
    takers = [Copies(), Copies()]
    run(stage_of, "forward", 2, takers)
    assert takers[0].of == takers[1].of == {}
