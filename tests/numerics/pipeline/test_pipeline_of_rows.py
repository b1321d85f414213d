"""One answer a row (a label, a score): the loss is transformers' own, and k stages train what one device trains."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import load_whole_model
from coterie.pipeline.micro_batch import MicroBatch, split_batch
from coterie.tasks.regression import Regression
from coterie.tasks.sequence_classification import SequenceClassification

ADAMW = OptimizerSpec(name="adamw", learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.0, total_samples=60)
STEPS = 3
ROWS = (8, 11, 9, 10)
"""No micro-batch of one row: the last bit of its pooled vector's product depends on where the weights lie in memory."""
TOKENS = (9, 12, 5, 14)
PAD = 3
"""Also a token that occurs within rows and at their ends, as an end of text used for padding does."""

TASKS = {
    "labels": (SequenceClassification(labels=("a", "b", "c")), {"num_labels": 3}),
    "scores": (Regression(), {"num_labels": 1, "problem_type": "regression"}),
}
SHAPE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 61}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {**SHAPE, "max_position_embeddings": 32, "type_vocab_size": 2, "classifier_dropout": 0.2},
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 61, "n_positions": 32},
    "llama": {**SHAPE, "num_key_value_heads": 1, "attention_dropout": 0.1},
}


def make_batch(kind: str, step: int, *, types: bool) -> tuple[MicroBatch, ...]:
    """Padded pairs of texts; some rows have no answer, and at step 1 a whole micro-batch has none."""
    generator = torch.Generator().manual_seed(500 + step)
    rows, tokens = ROWS[step % len(ROWS)], TOKENS[step % len(TOKENS)]
    ids = torch.randint(PAD, 61, (rows, tokens), generator=generator)
    lengths = torch.randint(2, tokens + 1, (rows, 1), generator=generator)
    real = torch.arange(tokens)[None] < lengths
    unanswered = torch.rand(rows, generator=generator) < 0.2
    unanswered[0] = False
    if step == 1:
        unanswered[3:6] = True
    if kind == "labels":
        answers = torch.randint(0, 3, (rows,), generator=generator).masked_fill(unanswered, -100)
    else:
        answers = torch.randn(rows, generator=generator).masked_fill(unanswered, float("nan"))
    inputs = {"input_ids": ids.masked_fill(~real, PAD), "attention_mask": real.long()}
    if types:
        inputs["token_type_ids"] = ((torch.arange(tokens)[None] > lengths // 2) & real).long()
    seen = sum(ROWS[earlier % len(ROWS)] for earlier in range(step))
    return split_batch(inputs, answers, micro_batches=4, step=step, samples_seen=seen)


def make_case(lab: Any, folder: Path, family: str, kind: str, **wishes: Any) -> Any:
    """A model on disk that labels, or scores, rows."""
    config = AutoConfig.for_model(family, **FAMILIES[family], **TASKS[kind][1], pad_token_id=PAD)
    torch.manual_seed(9)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return lab.Case(folder, "AutoModelForSequenceClassification", **wishes)


CASES = list(itertools.product(FAMILIES, TASKS))
TRAINED = (("bert", "labels"), ("bert", "scores"), ("gpt2", "labels"), ("llama", "scores"))


@pytest.mark.parametrize(("family", "kind"), TRAINED)
def test_any_number_of_stages_equals_one_device_bit_for_bit_with_dropout_on(
    lab: Any, tmp_path: Path, family: str, kind: str
) -> None:
    case = make_case(lab, tmp_path, family, kind)
    task = TASKS[kind][0]

    def batches(step: int) -> tuple[MicroBatch, ...]:
        return make_batch(kind, step, types=family == "bert")

    expected = lab.Reference(case, ADAMW, task)
    start = expected.parameters()
    expected.run(STEPS, batches)
    assert len(set(expected.losses)) > STEPS
    for stages in (2, 3) if (family, kind) == TRAINED[0] else (3,):
        got = lab.Pipeline(case, case.cuts(stages), ADAMW, task=task, batches=batches).run("flush", STEPS)
        assert got.losses == expected.losses
        assert lab.equal(got.parameters(), expected.parameters())
        assert not lab.equal(got.parameters(), start)


def test_recomputed_adapters_over_three_stages_equal_one_device(lab: Any, tmp_path: Path) -> None:
    kind = "labels"
    case = make_case(lab, tmp_path, "llama", kind, method="lora")
    task = TASKS[kind][0]

    def batches(step: int) -> tuple[MicroBatch, ...]:
        return make_batch(kind, step, types=False)

    expected = lab.Reference(case, ADAMW, task).run(STEPS, batches)
    got = lab.Pipeline(case, case.cuts(3), ADAMW, task=task, batches=batches, recompute=True).run("flush", STEPS)
    assert got.losses == expected.losses
    assert lab.equal(got.parameters(), expected.parameters())
    assert any("lora_B" in name for name in got.parameters())
    assert any("score" in name for name in got.parameters())


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_loss_of_a_batch_and_its_gradient_are_transformers_own(
    lab: Any, tmp_path: Path, family: str, kind: str
) -> None:
    """Over micro-batches of unequal numbers of answered rows, against the model's own loss of all of them at once."""
    case = make_case(lab, tmp_path, family, kind)
    task = TASKS[kind][0]
    parts = [part for part in make_batch(kind, 0, types=family == "bert") if part.rows]
    ours = load_whole_model(case.spec, case.weights()).eval()
    total = 0.0
    for part in parts:
        loss = task.loss_sum(ours(**part.inputs).logits, part.labels) / part.step_loss_tokens
        loss.backward()
        total += float(loss.detach())
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    answers = torch.cat([part.labels for part in parts])
    known = answers.isfinite() & (answers != -100)
    inputs = {name: torch.cat([part.inputs[name] for part in parts])[known] for name in parts[0].inputs}
    expected = plain(**inputs, labels=answers[known]).loss
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 1e-6:
            found = ours.get_parameter(name).grad
            assert (found - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_nothing_but_padding_does_not_disturb_the_others(lab: Any, tmp_path: Path, family: str) -> None:
    """As a tokenizer without special tokens makes of an empty text."""
    case = make_case(lab, tmp_path, family, "labels")
    model = load_whole_model(case.spec, case.weights()).eval()
    ids = torch.tensor([[5, 6, 7], [PAD, PAD, PAD]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])

    def logits(rows: slice) -> Tensor:
        with torch.no_grad():
            result: Tensor = model(input_ids=ids[rows], attention_mask=mask[rows]).logits
        return result

    both = logits(slice(0, 2))
    assert torch.isfinite(both).all()
    torch.testing.assert_close(both[:1], logits(slice(0, 1)), rtol=1e-5, atol=1e-6)
