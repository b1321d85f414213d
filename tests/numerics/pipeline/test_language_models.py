"""Causal language modelling over a pipeline: the loss curve of one device and of a plain loop, packed rows included."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from coterie.jobs.model_spec import LoraSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import load_whole_model, named_by_unit
from coterie.pipeline.micro_batch import MicroBatch
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.collate import collate
from coterie.tasks.examples import EncodedExample
from coterie.tasks.language_encoding import TokenRow, encode_tokens, pack_rows

TASK = CausalLm()
SGD = OptimizerSpec(name="sgd", momentum=0.9, learning_rate=0.05, max_grad_norm=1.0, total_samples=10_000)
"""Not AdamW: it divides the gradients of key biases, which are nothing but rounding, by themselves."""
STEPS = 4
MICRO_BATCHES = 4
PAD = 0


def made_rows(count: int, seed: int, *, most: int = 12) -> list[EncodedExample]:
    """Rows of changing lengths with a masked prompt; their last token is the pad token, which is learnt."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt, answer = int(draw.integers(1, most // 2)), int(draw.integers(1, most // 2))
        ids = [*draw.integers(1, 61, prompt + answer).tolist(), PAD]
        rows.append(encode_tokens(TokenRow(ids, [False] * prompt + [True] * (answer + 1)), 30))
    return rows


def micro_batches(step: int, *, packed: bool = False) -> tuple[MicroBatch, ...]:
    """A step of seven rows in four micro-batches, the last with one row; in one of step 1 nothing is learnt."""
    rows = made_rows(7, seed=step)
    parts = [rows[start : start + 2] for start in range(0, 7, 2)]
    if step == 1:
        parts[1] = [encode_tokens(TokenRow([5, 6, 7], [False] * 3), 30)]
    if packed:
        parts = [list(pack_rows(part, 26)) for part in parts]
    counts = [sum(TASK.count_loss_tokens(row.labels) for row in part) for part in parts]
    return tuple(_micro_batch(step, index, part, sum(counts)) for index, part in enumerate(parts))


def _micro_batch(step: int, index: int, rows: list[EncodedExample], step_tokens: int) -> MicroBatch:
    arrays = {name: torch.from_numpy(array) for name, array in collate(rows, pad_token_id=PAD).items()}
    labels = arrays.pop("labels")
    return MicroBatch(
        step=step,
        micro_batch=index,
        rows=len(rows),
        inputs=arrays,
        labels=labels,
        step_loss_tokens=step_tokens,
        micro_batch_loss_tokens=sum(TASK.count_loss_tokens(row.labels) for row in rows),
        samples_seen=7 * step,
    )


def check_equal(lab: Any, case: Any, stages: int, batches: Callable[[int], tuple[MicroBatch, ...]]) -> None:
    whole = lab.Reference(case, SGD, task=TASK).run(STEPS, batches)
    pipeline = lab.Pipeline(case, case.cuts(stages), SGD, batches=batches, task=TASK).run("flush", STEPS)

    assert pipeline.losses == pytest.approx(whole.losses, rel=1e-5)
    assert lab.max_relative_difference(pipeline.parameters(), whole.parameters()) < 1e-4


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("model", ["llama", "gpt2", "odd_opt"])
def test_a_pipeline_learns_what_one_device_learns(lab: Any, model: str, stages: int) -> None:
    """Tied embeddings, fully trained: both ends' gradients are summed. Dropout is on."""
    case = getattr(lab, model)()
    assert case.anatomy.tied is not None

    check_equal(lab, case, stages, micro_batches)


def test_adapters_learn_over_three_stages_what_they_learn_on_one_device(lab: Any) -> None:
    check_equal(lab, lab.llama(method="lora", lora=LoraSpec(rank=2, dropout=0.1)), 3, micro_batches)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_packed_rows_reach_every_stage_apart(lab: Any, model: str) -> None:
    case = getattr(lab, model)()

    check_equal(lab, case, 3, lambda step: micro_batches(step, packed=True))


@pytest.mark.parametrize("model", ["llama", "gpt2", "odd_opt"])
def test_the_loss_curve_is_that_of_a_plain_loop_with_transformers_own_loss(lab: Any, model: str) -> None:
    """Every label is given, so that transformers' own shifted loss is the same mean; dropout off, plain AdamW."""
    case = getattr(lab, model)()
    whole = load_whole_model(case.spec, case.weights()).eval()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, weight_decay=0.0)
    plain = OptimizerSpec(learning_rate=1e-3, lr_schedule="constant", max_grad_norm=0, weight_decay=0)
    pipeline = lab.Pipeline(case, case.cuts(3), plain, batches=_all_learnt, task=TASK)
    for stage in pipeline.stages:
        _switch_dropout_off(stage.module)
    pipeline.run("flush", STEPS)
    expected = list(_plain_losses(whole, optimizer))

    tokens = [batch.step_loss_tokens for batch in (_all_learnt(step)[0] for step in range(STEPS))]
    sums = [sum(pipeline.losses[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]) for step in range(STEPS)]
    assert [total / count for total, count in zip(sums, tokens, strict=True)] == pytest.approx(expected, rel=1e-4)


def _all_learnt(step: int) -> tuple[MicroBatch, ...]:
    """Rows of one length, every token but the first learnt."""
    ids = torch.randint(1, 61, (8, 9), generator=torch.Generator().manual_seed(step)).tolist()
    rows = [encode_tokens(TokenRow(row, [True] * 9), 30) for row in ids]
    parts = [rows[start : start + 2] for start in range(0, 8, 2)]
    return tuple(_micro_batch(step, index, part, 64) for index, part in enumerate(parts))


def _plain_losses(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    for step in range(STEPS):
        ids = torch.cat([batch.inputs["input_ids"] for batch in _all_learnt(step)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _switch_dropout_off(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def test_masked_labels_mean_what_transformers_own_labels_mean(lab: Any) -> None:
    """Transformers shifts labels in its loss; ours are shifted already. Both mask prompt and padding."""
    case = lab.llama()
    model = load_whole_model(case.spec, case.weights()).eval()
    rows = made_rows(6, seed=3)
    arrays = {name: torch.from_numpy(array) for name, array in collate(rows, pad_token_id=PAD).items()}
    labels = arrays.pop("labels")
    unshifted = functional.pad(labels, (1, 0), value=-100)[:, :-1]

    output = model(**arrays, labels=unshifted)

    tokens = TASK.count_loss_tokens(labels.numpy())
    assert (TASK.loss_sum(output.logits, labels) / tokens).item() == pytest.approx(output.loss.item(), rel=1e-6)


def test_a_step_of_packed_rows_is_the_step_of_the_rows_apart(lab: Any) -> None:
    """Loss, gradients and the update: dropout off, since masks depend on the shape."""
    case = lab.llama()
    found = []
    for packed in (False, True):
        reference = lab.Reference(case, SGD, task=TASK)
        _switch_dropout_off(reference.model)
        losses = [
            sum(reference.trainer.run_step(micro_batches(step, packed=packed)).micro_batch_loss_sums)
            for step in range(STEPS)
        ]
        found.append((losses, {name: p.detach().clone() for name, p in named_by_unit(reference.model).items()}))

    (apart, apart_weights), (together, together_weights) = found
    assert together == pytest.approx(apart, rel=1e-5)
    assert lab.max_relative_difference(together_weights, apart_weights) < 1e-4


def test_packing_saves_contexts_in_these_tests() -> None:
    """Or they would show nothing."""
    counts = [
        (sum(b.rows for b in micro_batches(s)), sum(b.rows for b in micro_batches(s, packed=True))) for s in (0, 2)
    ]

    assert all(packed < apart for apart, packed in counts)
    assert list(itertools.chain(*([*b.inputs] for b in micro_batches(0, packed=True)))).count("attention_mask") == 0
