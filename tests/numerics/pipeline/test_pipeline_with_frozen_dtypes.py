"""Frozen weights in bfloat16, 8 and 4 bits: k stages train what one device trains that holds its weights so."""

from typing import Any

import pytest
import torch

from coterie.jobs.model_spec import LoraSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import RandomKey, seed_by_key
from coterie.models.frozen_linear import FrozenLinear

STEPS = 5
ADAMW = OptimizerSpec(name="adamw", learning_rate=3e-3, max_grad_norm=0.0, lr_schedule="constant")
LORA = LoraSpec(rank=2, alpha=4, dropout=0.1)
SMALL = ("bfloat16", "int8", "int4")


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_any_number_of_stages_equals_one_device_bit_for_bit(lab: Any, family: str, dtype: str) -> None:
    case = getattr(lab, family)(method="lora", lora=LORA, frozen_dtype=dtype)
    expected = lab.Reference(case, ADAMW)
    start = expected.parameters()
    expected.run(STEPS)
    for stages in (1, 3):
        got = lab.Pipeline(case, case.cuts(stages), ADAMW).run("flush", STEPS)
        assert got.losses == expected.losses
        assert lab.equal(got.parameters(), expected.parameters())
    assert not lab.equal(expected.parameters(), start)


@pytest.mark.parametrize("dtype", SMALL)
def test_losses_are_near_those_of_full_precision_and_not_the_same(lab: Any, dtype: str) -> None:
    exact = lab.Reference(lab.bert(method="lora", lora=LORA), ADAMW).run(STEPS).losses
    found = lab.Reference(lab.bert(method="lora", lora=LORA, frozen_dtype=dtype), ADAMW).run(STEPS).losses
    assert found != exact
    assert found == pytest.approx(exact, rel={"bfloat16": 1e-2, "int8": 2e-2, "int4": 0.2}[dtype])


@pytest.mark.parametrize("kind", ["stash", "gpipe"])
def test_recomputation_and_other_schedules_change_nothing_either(lab: Any, kind: str) -> None:
    case = lab.bert(method="lora", lora=LORA, frozen_dtype="int4")
    kept, recomputed = (
        lab.Pipeline(case, case.cuts(3), ADAMW, recompute=recompute).run(kind, 3) for recompute in (False, True)
    )
    assert recomputed.losses == kept.losses
    assert lab.equal(recomputed.parameters(), kept.parameters())


@pytest.mark.parametrize("variant", ["rslora", "dora"])
def test_variants_of_lora_work_on_frozen_weights_in_4_bits(lab: Any, variant: str) -> None:
    lora = LoraSpec(rank=2, alpha=4, variant=variant)
    case = lab.bert(method="lora", lora=lora, frozen_dtype="int4")
    expected = lab.Reference(case, ADAMW).run(STEPS)
    got = lab.Pipeline(case, case.cuts(3), ADAMW).run("flush", STEPS)
    assert got.losses == expected.losses
    assert lab.equal(got.parameters(), expected.parameters())


@pytest.mark.parametrize("method", ["bitfit", "full"])
def test_biases_and_blocks_above_can_be_trained_over_frozen_weights(lab: Any, method: str) -> None:
    wishes = {} if method == "bitfit" else {"frozen_patterns": ("block 0", "block 1")}
    case = lab.bert(method=method, frozen_dtype="int8", **wishes)
    expected = lab.Reference(case, ADAMW).run(STEPS)
    got = lab.Pipeline(case, case.cuts(3), ADAMW).run("flush", STEPS)
    assert got.losses == expected.losses
    assert lab.max_relative_difference(got.parameters(), expected.parameters()) < 1e-6


def test_bfloat16_arithmetic_over_frozen_4_bits_gives_the_same_bits_for_every_cut(lab: Any) -> None:
    case = lab.bert(method="lora", lora=LORA, frozen_dtype="int4", compute_dtype="bfloat16")
    one, three = (lab.Pipeline(case, case.cuts(stages), ADAMW).run("flush", 3) for stages in (1, 3))
    assert three.losses == one.losses
    assert lab.equal(three.parameters(), one.parameters())


def test_a_run_continued_from_its_state_equals_one_that_was_not_interrupted(lab: Any) -> None:
    case = lab.bert(method="lora", lora=LORA, frozen_dtype="int4")
    whole = lab.Pipeline(case, case.cuts(2), ADAMW).run("flush", STEPS)
    first = lab.Pipeline(case, case.cuts(2), ADAMW).run("flush", 2)
    second = lab.Pipeline(case, case.cuts(3), ADAMW)
    second.load(first.parameters(), first.optimizer_state())
    second.run("flush", STEPS - 2, first_step=2)
    assert first.losses + second.losses == whole.losses
    assert lab.equal(second.parameters(), whole.parameters())


def test_it_computes_what_transformers_and_peft_compute_with_the_unpacked_weights(lab: Any) -> None:
    """The reference is a plain PEFT model in float32 whose weights are what the packed ones stand for."""
    case = lab.bert(method="lora", lora=LORA, frozen_dtype="int4")
    frozen = lab.Reference(case, ADAMW).model
    plain = lab.Reference(lab.bert(method="lora", lora=LORA), ADAMW).model
    for name, module in frozen.named_modules():
        if isinstance(module, FrozenLinear):
            plain.get_submodule(name).weight.data = module.weight
    batch = lab.make_batch(0)[0]
    gradients = []
    for model in (frozen, plain):
        seed_by_key(model, case.anatomy)(RandomKey(lab.seed, 0, 0))
        loss = lab.TokenLoss().loss_sum(model(**batch.inputs).logits, batch.labels)
        loss.backward()
        gradients.append((float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (found, found_gradients), (expected, expected_gradients) = gradients
    assert found == pytest.approx(expected, rel=1e-6)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert torch.allclose(found_gradients[name], gradient, rtol=1e-4, atol=1e-6), name
