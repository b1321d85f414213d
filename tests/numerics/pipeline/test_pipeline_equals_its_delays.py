"""`stash` and `2bw` train exactly what a single process does that uses the weights the papers say, so many updates old.

The replay knows nothing of schedules: it keeps every version of the weights in a dictionary and takes the old ones by
arithmetic. PipeDream: stage s of S computes micro-batch n with the weights before its last S-1-s updates. 2BW:
W(t+1) = W(t) - f(gradient at W(t-1)).
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import RandomKey, load_whole_model, named_by_unit, seed_for
from coterie.models.skeleton import find_blocks

STEPS = 6
PLAIN = OptimizerSpec(learning_rate=3e-3, max_grad_norm=0.0, warmup_samples=10, total_samples=60)
CLIPPED = OptimizerSpec(learning_rate=3e-3, max_grad_norm=0.05, total_samples=60)
SGD = OptimizerSpec(name="sgd", learning_rate=0.05, momentum=0.9, max_grad_norm=0.0)

Weights = dict[str, Tensor]


class Replay:
    """A whole model whose weights are set by hand before every forward, and one torch optimizer per stage."""

    def __init__(self, lab: Any, case: Any, cuts: tuple[int, ...], spec: OptimizerSpec) -> None:
        self.lab, self.spec, self.case = lab, spec, case
        self.model = load_whole_model(case.spec, case.weights()).train()
        self.named = {n: p for n, p in named_by_unit(self.model).items() if p.requires_grad}
        self.stage_names = [
            [name for name in self.named if first <= case.anatomy.unit_of[name] < stop]
            for first, stop in itertools.pairwise(cuts)
        ]
        self.masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in self.named.items()}
        self.optimizers = [self._optimizer([self.masters[n] for n in names]) for names in self.stage_names]
        self.versions: list[list[Weights]] = [[self._snapshot(names)] for names in self.stage_names]
        self.losses: list[float] = []
        self._key = RandomKey(lab.seed, 0, 0)
        _, blocks = find_blocks(self.model)
        for unit, module in [(0, self.model), *((i + 1, block) for i, block in enumerate(blocks))]:
            module.register_forward_pre_hook(lambda *_, unit=unit: self._seed(unit))
        blocks[-1].register_forward_hook(lambda *_: self._seed(len(blocks) + 1))

    def gradient(self, version_of_stage: list[int], batch: Any, divisor: int) -> None:
        """Add the gradient at the given versions to the masters' gradients."""
        with torch.no_grad():
            for stage, version in enumerate(version_of_stage):
                for name, value in self.versions[stage][version].items():
                    self.named[name].copy_(value)
        self._key = RandomKey(self.lab.seed, batch.step, batch.micro_batch)
        loss = self.lab.TokenLoss().loss_sum(self.model(**batch.inputs).logits, batch.labels)
        (loss / divisor).backward()
        self.losses.append(loss.item())
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                master = self.masters[name]
                master.grad = parameter.grad if master.grad is None else master.grad + parameter.grad
                parameter.grad = None

    def update(self, stages: list[int], samples_seen: int) -> None:
        """Clip the gradients of `stages` together, and move these stages to their next version."""
        parameters = [self.masters[n] for stage in stages for n in self.stage_names[stage]]
        if self.spec.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.spec.max_grad_norm)
        for stage in stages:
            for group in self.optimizers[stage].param_groups:
                group["lr"] = self.spec.learning_rate_at(samples_seen)
            self.optimizers[stage].step()
            self.optimizers[stage].zero_grad()
            self.versions[stage].append(self._snapshot(self.stage_names[stage]))

    def repeat(self) -> None:
        """An update with nothing to apply: the next version equals the last."""
        for versions in self.versions:
            versions.append(versions[-1])

    def parameters(self) -> Weights:
        return {name: master.detach() for name, master in self.masters.items()}

    def _snapshot(self, names: list[str]) -> Weights:
        return {name: self.masters[name].detach().clone() for name in names}

    def _seed(self, unit: int) -> None:
        torch.manual_seed(seed_for(self._key, unit))

    def _optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        decay = {True: self.spec.weight_decay, False: 0.0}
        groups = [
            {"params": [p for p in parameters if (p.ndim > 1) is matrix], "weight_decay": decay[matrix]}
            for matrix in (True, False)
        ]
        if self.spec.name == "adamw":
            return torch.optim.AdamW(groups, lr=0.0, fused=True)
        return torch.optim.SGD(groups, lr=0.0, momentum=self.spec.momentum)


def replay_stash(lab: Any, case: Any, cuts: tuple[int, ...], spec: OptimizerSpec, delays: list[int]) -> Replay:
    replay = Replay(lab, case, cuts, spec)
    number = 0
    for step in range(STEPS):
        for batch in lab.make_batch(step):
            if batch.micro_batch_loss_tokens == 0:
                replay.losses.append(0.0)
                replay.repeat()
            else:
                versions = [max(0, number - delay) for delay in delays]
                replay.gradient(versions, batch, batch.micro_batch_loss_tokens)
                for stage in range(len(delays)):
                    replay.update([stage], batch.samples_seen)
            number += 1
    return replay


def replay_2bw(lab: Any, case: Any, cuts: tuple[int, ...], spec: OptimizerSpec) -> Replay:
    replay = Replay(lab, case, cuts, spec)
    stages = list(range(len(cuts) - 1))
    for step in range(STEPS):
        batches = lab.make_batch(step)
        for batch in batches:
            if batch.micro_batch_loss_tokens:
                replay.gradient([max(0, step - 1)] * len(stages), batch, batch.step_loss_tokens)
            else:
                replay.losses.append(0.0)
        if batches[0].step_loss_tokens:
            replay.update(stages, batches[0].samples_seen)
        else:
            replay.repeat()
    return replay


@pytest.mark.parametrize(
    ("stages", "method", "spec"),
    [(2, "full", PLAIN), (3, "full", SGD), (4, "full", PLAIN), (3, "lora", PLAIN)],
    ids=lambda value: getattr(value, "name", value),
)
def test_stash_equals_the_replay_of_pipedreams_delays_bit_for_bit(
    lab: Any, stages: int, method: str, spec: OptimizerSpec
) -> None:
    case = lab.bert() if method == "full" else lab.bert_lora()
    cuts = case.cuts(stages)
    expected = replay_stash(lab, case, cuts, spec, [stages - 1 - stage for stage in range(stages)])
    got = lab.Pipeline(case, cuts, spec).run("stash", STEPS)
    assert got.losses == expected.losses
    assert lab.equal(got.parameters(), expected.parameters())


def test_stash_with_deeper_queues_equals_the_replay_of_its_longer_delays(lab: Any) -> None:
    case = lab.bert()
    got = lab.Pipeline(case, case.cuts(3), PLAIN).run("stash", STEPS, in_flight=(6, 3, 1))
    expected = replay_stash(lab, case, case.cuts(3), PLAIN, [5, 2, 0])
    assert got.losses == expected.losses
    assert lab.equal(got.parameters(), expected.parameters())


def test_stash_clips_each_stage_by_its_own_norm(lab: Any) -> None:
    case = lab.bert()
    expected = replay_stash(lab, case, case.cuts(3), CLIPPED, [2, 1, 0])
    got = lab.Pipeline(case, case.cuts(3), CLIPPED).run("stash", STEPS)
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert lab.max_relative_difference(got.parameters(), expected.parameters()) < 1e-6
    assert not any(report.grad_norm_is_global for reports in got.reports for report in reports)


@pytest.mark.parametrize(("stages", "method"), [(1, "full"), (3, "lora"), (4, "full")])
def test_2bw_equals_the_replay_of_one_step_of_delay_bit_for_bit(lab: Any, stages: int, method: str) -> None:
    case = lab.bert() if method == "full" else lab.bert_lora()
    expected = replay_2bw(lab, case, case.cuts(stages), PLAIN)
    got = lab.Pipeline(case, case.cuts(stages), PLAIN).run("2bw", STEPS)
    assert got.losses == expected.losses
    assert lab.equal(got.parameters(), expected.parameters())


def test_2bw_clips_by_the_global_norm(lab: Any) -> None:
    case = lab.bert()
    expected = replay_2bw(lab, case, case.cuts(3), CLIPPED)
    got = lab.Pipeline(case, case.cuts(3), CLIPPED).run("2bw", STEPS)
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert lab.max_relative_difference(got.parameters(), expected.parameters()) < 1e-6


def test_the_delays_are_seen_in_the_numbers(lab: Any) -> None:
    case = lab.bert()
    kinds = {
        kind: lab.Pipeline(case, case.cuts(3), PLAIN).run(kind, STEPS).losses for kind in ("flush", "stash", "2bw")
    }
    assert kinds["flush"] != kinds["stash"]
    assert kinds["flush"] != kinds["2bw"]
