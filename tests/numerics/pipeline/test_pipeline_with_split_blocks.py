"""A pipeline whose stages share their blocks over backends trains what the plain pipeline trains, in every mode."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from coterie.backends.backend import Backend
from coterie.backends.catalog import find_backends
from coterie.backends.numpy_backend import NumpyBackend
from coterie.backends.torch_backend import TorchBackend
from coterie.errors import BackendError
from coterie.heads.install import install_split
from coterie.heads.pool import BackendPool
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.pipeline.micro_batch import MicroBatch, split_batch
from coterie.planner.head_allocation import HeadAllocation, PartAllocation, PartShare

STEPS = 4
SGD = OptimizerSpec(name="sgd", learning_rate=0.05, momentum=0.9, max_grad_norm=0.0)
ADAM = OptimizerSpec(learning_rate=1e-3, max_grad_norm=1.0)


def dealt(names: Sequence[str], counts: Sequence[int]) -> PartAllocation:
    shares = tuple(PartShare(backend=n, count=c, predicted_s=1.0) for n, c in zip(names, counts, strict=True))
    return PartAllocation(shares=shares, predicted_s=1.0, best_single_s=1.0, best_single=names[0])


@contextlib.contextmanager
def shared(pipeline: Any) -> Iterator[None]:
    """Every stage of a pipeline over torch and NumPy of its own."""
    with contextlib.ExitStack() as pools:
        for stage in pipeline.stages:
            pool = pools.enter_context(BackendPool([TorchBackend(), NumpyBackend()]))
            names = [info.name for info in pool.infos]
            allocation = HeadAllocation(attention=dealt(names, (1, 1)), neurons=dealt(names, (10, 14)))
            assert not install_split(stage, allocation, pool).unsplit
        yield


@pytest.mark.parametrize(
    ("family", "kind", "recompute"),
    [
        ("bert", "flush", False),
        ("bert", "stash", False),
        ("bert", "stash", True),
        ("bert", "2bw", True),
        ("llama", "flush", True),
        ("llama", "stash", False),
        ("llama", "2bw", False),
    ],
)
def test_shared_blocks_train_alike_with_several_micro_batches_and_versions_in_flight(lab, family, kind, recompute):
    # A trained matrix at both ends of a pipeline allows `flush` only.
    frozen = ["model.embed_tokens*"] if family == "llama" else []
    case = getattr(lab, family)(frozen_patterns=frozen)
    plain = lab.Pipeline(case, case.cuts(3), SGD, recompute=recompute).run(kind, STEPS)
    pipeline = lab.Pipeline(case, case.cuts(3), SGD, recompute=recompute)
    with shared(pipeline):
        pipeline.run(kind, STEPS)
    assert pipeline.losses == pytest.approx(plain.losses, rel=2e-6)
    assert lab.max_relative_difference(pipeline.parameters(), plain.parameters()) < 5e-6


def test_adapters_in_shared_blocks_train_alike(lab):
    case = lab.bert_lora()
    plain = lab.Pipeline(case, case.cuts(2), SGD).run("stash", STEPS)
    pipeline = lab.Pipeline(case, case.cuts(2), SGD)
    with shared(pipeline):
        pipeline.run("stash", STEPS)
    assert pipeline.losses == pytest.approx(plain.losses, rel=2e-6)
    assert lab.max_relative_difference(pipeline.parameters(), plain.parameters()) < 1e-5


def same_shape(step: int) -> tuple[MicroBatch, ...]:
    """Padded rows of one length: backends that build a graph for each size build one."""
    draw = torch.Generator().manual_seed(2000 + step)
    ids = torch.randint(1, 61, (8, 7), generator=draw)
    labels = torch.randint(0, 5, (8, 7), generator=draw)
    real = torch.arange(7)[None] < torch.randint(3, 8, (8, 1), generator=draw)
    inputs = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    return split_batch(inputs, labels.masked_fill(~real, -100), micro_batches=4, step=step, samples_seen=8 * step)


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_many_steps_over_torch_opencl_and_mnn_equal_torch_alone(lab, steps):
    found: list[Backend] = [TorchBackend()]
    for name in ("opencl", "mnn"):
        try:
            found += find_backends(1, (name,)).backends[:1]
        except BackendError as error:
            for one in found:
                one.close()
            pytest.skip(error.message)
    case = lab.bert()
    plain = lab.Pipeline(case, case.cuts(3), ADAM, batches=same_shape).run("flush", steps)
    pipeline = lab.Pipeline(case, case.cuts(3), ADAM, batches=same_shape)
    with BackendPool(found) as pool:
        names = [info.name for info in pool.infos]
        # Two of four blocks. Of two heads two backends get one each; neurons go to all three.
        allocation = HeadAllocation(attention=dealt(names[1:], (1, 1)), neurons=dealt(names, (10, 8, 6)))
        assert not install_split(pipeline.stages[1], allocation, pool).unsplit
        pipeline.run("flush", steps)
        assert not pool.bypassed
        assert all(pool.usage[name].jobs for name in names)
    assert min(plain.losses[1:]) < plain.losses[0]
    assert pipeline.losses == pytest.approx(plain.losses, rel=1e-5)
