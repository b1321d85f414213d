"""Whole runs in which little is trained: the curve of one device, gradients only as far as needed, plain output."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForTokenClassification

from coterie.coordinator.one_device import largest_difference

STEPS = 4


def bytes_sent(result):
    """Per link: tensor bytes towards the output layer, and back."""
    return [(link.forward_bytes, link.backward_bytes) for link in result.summary.links]


def moved(model, result):
    """Names of the parameters that training has changed, beside a new classifier."""
    config = AutoConfig.from_pretrained(result.model_folder)
    before = AutoModelForTokenClassification.from_pretrained(model, config=config).state_dict()
    after = AutoModelForTokenClassification.from_pretrained(result.model_folder).state_dict()
    return {name for name in after if "classifier" not in name and not torch.equal(after[name], before[name])}


@pytest.mark.parametrize("schedule", ["flush", pytest.param("stash", marks=pytest.mark.slow)])
def test_with_the_head_alone_no_gradient_leaves_the_last_stage(
    schedule, tmp_path, make_recipe, cluster, model, run, alone
):
    recipe = make_recipe(tmp_path / "run", method="head", schedule=schedule, max_steps=STEPS, cuts=(2, 4))
    watcher = cluster()
    result = run(recipe, watcher)
    if schedule == "flush":
        assert largest_difference(result.losses, alone(recipe, STEPS)) < 1e-6
    assert len(result.losses) == STEPS
    assert any("run forward only: nothing is trained there or before" in note for note in result.plan.notes)
    assert [(there > 0, back > 0) for there, back in bytes_sent(result)] == [(True, False)] * 2
    assert moved(model, result) == set()
    assert watcher.failures == {}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_dora_on_the_last_blocks_gives_an_adapter_that_plain_peft_loads(
    tmp_path, make_recipe, cluster, model, run, alone
):
    recipe = make_recipe(
        tmp_path / "run", method="lora", lora_variant="dora", lora_dropout=0.1, trainable=("block 2..3",),
        max_steps=STEPS, cuts=(2, 4),
    )  # fmt: skip
    result = run(recipe, cluster())
    assert largest_difference(result.losses, alone(recipe, STEPS)) < 1e-6
    assert [back > 0 for _, back in bytes_sent(result)] == [False, True]
    config = AutoConfig.from_pretrained(result.model_folder)
    base = AutoModelForTokenClassification.from_pretrained(model, config=config)
    loaded = PeftModel.from_pretrained(base, result.model_folder)
    vectors = [name for name, _ in loaded.named_parameters() if "lora_magnitude_vector" in name]
    assert len(vectors) == 4
    assert all(".layer.2." in name or ".layer.3." in name for name in vectors)


def test_bitfit_moves_biases_and_nothing_else(tmp_path, make_recipe, cluster, model, run, alone):
    recipe = make_recipe(tmp_path / "run", method="bitfit", max_steps=STEPS)
    result = run(recipe, cluster())
    assert largest_difference(result.losses, alone(recipe, STEPS)) < 1e-6
    names = moved(model, result)
    assert names
    assert all(name.endswith(".bias") for name in names)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("method", "options"),
    [("lora", {"lora_rank": 2, "lora_dropout": 0.1}), pytest.param("bitfit", {}, marks=pytest.mark.slow)],
)
def test_a_few_parameters_are_learnt_by_delayed_updates_too(
    method, options, tmp_path, make_recipe, cluster, model, run
):
    recipe = make_recipe(tmp_path / "run", method=method, schedule="2bw", micro_batches=4, max_steps=9, **options)
    watcher = cluster()
    result = run(recipe, watcher)
    assert watcher.failures == {}
    assert (result.plan.schedule, len(result.losses)) == ("2bw", 9)
    assert result.losses[-1] < result.losses[0]
    if method == "bitfit":
        assert all(name.endswith(".bias") for name in moved(model, result))
    else:
        config = AutoConfig.from_pretrained(result.model_folder)
        base = AutoModelForTokenClassification.from_pretrained(model, config=config)
        loaded = PeftModel.from_pretrained(base, result.model_folder)
        ups = [parameter for name, parameter in loaded.named_parameters() if "lora_B" in name]
        assert all(up.abs().sum() > 0 for up in ups)
