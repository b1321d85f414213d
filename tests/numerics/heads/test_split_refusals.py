"""What no share computes runs unsplit, exactly as before, and is named with the reason."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from coterie.heads.install import install_split
from coterie.models.generation import GenerationStage
from coterie.planner.head_allocation import HeadAllocation

TOLERANCE = 5e-6
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")


class Louder(LlamaAttention):
    """Looks like the attention of its family, and is not."""

    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        return output * 1.01, weights


@pytest.mark.parametrize(
    ("family", "reason", "neurons"),
    [
        ("qwen3", "its attention has k_norm and q_norm, which no share computes", True),
        ("gemma2", "its attention has attn_logit_softcapping, which no share computes", True),
        ("stablelm", "stablelm blocks are not among those that can be split", False),
    ],
)
def test_attention_that_does_more_is_named_and_runs_as_it_is(heads, pool, family, reason, neurons):
    model = heads.model(family)
    split, unsplit = model.stage(), model.stage()
    report = heads.split(split, pool)
    assert not report.attention
    assert bool(report.neurons) == neurons
    assert reason in report.unsplit["block 0 attention"]
    inputs = model.inputs(lengths=(7, 4, 2))
    assert heads.run(split, model, inputs).difference(heads.run(unsplit, model, inputs)) < TOLERANCE


def test_a_block_whose_trial_differs_is_put_back(heads, pool):
    model = heads.model("llama 9/3")
    stage = model.stage()
    stage.module.model.layers[1].self_attn.__class__ = Louder
    report = heads.split(stage, pool)
    assert report.attention == (0,)
    assert report.neurons == (0, 1)
    assert "a trial of it in shares differs by" in report.unsplit["block 1 attention"]
    assert "forward" not in vars(stage.module.model.layers[1].self_attn)


def test_an_allocation_for_other_blocks_is_not_used(heads, pool):
    stage = heads.model("bert").stage()
    names = [info.name for info in pool.infos]
    allocation = HeadAllocation(attention=heads.dealt(5, names), neurons=heads.dealt(40, names))
    report = install_split(stage, allocation, pool)
    assert report.neurons == (0, 1)
    assert report.unsplit["block 1 attention"] == "it has 4 KV groups, and the allocation deals out 5"


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        ({"compute_dtype": "bfloat16"}, "the stage computes in bfloat16"),
        ({"frozen_dtype": "bfloat16"}, "its weights are held in bfloat16"),
        ({"frozen_dtype": "int8"}, "its weights are held in int8"),
    ],
)
def test_other_number_types_run_unsplit(heads, pool, wishes, reason):
    if wishes.get("frozen_dtype") == "int8":
        pytest.importorskip("bitsandbytes")
    model = heads.model("bert", method="lora", **wishes)
    report = heads.split(model.stage(), pool)
    assert not report.split_blocks
    assert reason in report.unsplit["block 0 attention"] + report.unsplit["block 0 neurons"]


def test_adapters_that_change_the_weights_themselves_run_unsplit(heads, pool):
    model = heads.lora("bert", variant="dora", target_modules=("query",))
    report = heads.split(model.stage(), pool)
    assert "DoRA" in report.unsplit["block 0 attention"]
    assert report.neurons == (0, 1)


def test_tokens_that_see_nothing_run_unsplit_and_the_same(heads, pool):
    model = heads.model("llama 9/3")
    inputs = model.inputs(lengths=(7, 4, 2), left=True)
    split, unsplit = model.stage(), model.stage()
    heads.split(split, pool)
    assert heads.run(split, model, inputs).difference(heads.run(unsplit, model, inputs)) < TOLERANCE


def test_a_stage_without_blocks_has_nothing_to_split(heads, pool):
    model = heads.model("bert")
    report = heads.split(model.stage(3), pool)
    assert not report.split_blocks
    assert not report.unsplit


def test_text_is_written_with_the_blocks_own_code(heads, pool):
    model = heads.model("llama 9/3")
    texts = []
    for shared in (True, False):
        stage = model.stage(0)
        if shared:
            heads.split(stage, pool)
        writer = GenerationStage(stage)
        group = writer.begin(model.inputs()["input_ids"], None, 4)
        for _ in range(4):
            group.append(writer.forward(group, None).argmax(-1))
        texts.append(group.ids)
    assert torch.equal(*texts)
