"""What backends are measured with is what they will be given: shapes, masks and dropout of a block, in every family."""

import pytest

from coterie.heads.layout import attention_layout, forms_of, neuron_layout
from coterie.heads.shapes import block_shapes
from coterie.heads.trials import cosines_of, own_blocks, quiet, trials_of

ENCODERS = {"bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "distilbert"}


def test_shapes_are_those_that_will_be_dealt_out(heads, family):
    stage = heads.model(family).stage()
    shapes = block_shapes(stage)
    number, block = next(own_blocks(stage.module))
    attention, neurons = forms_of(stage.module.config.model_type)
    with quiet(stage):
        trial = trials_of(stage, {number: block})[number][-1]
    assert shapes.attention == attention_layout(block, attention, cosines_of(trial)).shape
    assert shapes.neurons == neuron_layout(block, neurons).shape
    assert shapes.notes == ()


def test_a_decoder_is_causal_also_where_no_mask_says_so(heads, family):
    # Without padding families pass no mask at all, and the attention's own code hides what comes later.
    assert block_shapes(heads.model(family).stage()).causal == (family not in ENCODERS)


@pytest.mark.parametrize(("family", "drops"), [("bert", True), ("llama 9/3", True), ("qwen2", False)])
def test_dropout_is_that_of_the_config(heads, family, drops):
    assert block_shapes(heads.model(family).stage()).dropout == drops


def test_a_family_that_is_not_known_says_so(heads):
    shapes = block_shapes(heads.model("stablelm").stage())
    assert shapes.attention is None
    assert shapes.neurons is None
    assert "stablelm blocks are not among those that can be split" in shapes.notes[0]
