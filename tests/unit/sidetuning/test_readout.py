import msgspec
import pytest
import torch
from transformers import BertConfig, GPT2Config, ModernBertConfig

from coterie.errors import RecipeError, UnsupportedModelError
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_spec import SideSpec
from coterie.models import open_model
from coterie.sidetuning.backbone import make_backbone_spec
from coterie.sidetuning.readout import TokenSelector, reads_of
from coterie.sidetuning.side_model import build_side_model

ROWS, TAGS, TEXT = "AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModelForCausalLM"
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}


def spec_of(config, auto_class):
    return ModelSpec(config_json=config.to_json_string(), auto_class=auto_class, method="none")


def test_what_is_read_is_found_by_gradients_whatever_the_vocabulary():
    assert reads_of(spec_of(BertConfig(**BERT), ROWS)) == "first"
    assert reads_of(spec_of(BertConfig(**BERT), TAGS)) == "labelled"
    assert reads_of(spec_of(GPT2Config(**GPT2, pad_token_id=50256), ROWS)) == "last"
    assert reads_of(spec_of(GPT2Config(**GPT2), TEXT)) == "labelled"


def test_a_model_that_averages_tokens_is_refused_with_the_reason():
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = ModernBertConfig(**small, classifier_pooling="mean")
    with pytest.raises(UnsupportedModelError, match="reads several tokens of a row at once") as refused:
        reads_of(spec_of(config, ROWS))
    assert 'classifier_pooling = "cls"' in refused.value.hint


def test_the_last_token_is_the_last_that_is_not_the_pad_token_as_the_model_has_it():
    selector = TokenSelector(spec_of(GPT2Config(**GPT2, pad_token_id=9), ROWS), SideSpec())
    ids = torch.tensor([[3, 4, 9, 9], [3, 9, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    selection = selector.select({"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1]))
    assert selection.positions.tolist() == [1, 3]


def test_packed_rows_have_no_mask_and_every_token_counts_as_present():
    selector = TokenSelector(spec_of(GPT2Config(**GPT2), TEXT), SideSpec(selects_tokens=False))
    ids = torch.tensor([[3, 4, 5, 6]])
    selection = selector.select({"input_ids": ids}, torch.tensor([[4, -100, 6, -100]]))
    assert selection.counts.tolist() == [4]
    assert selection.loss_index.tolist() == [0, 2]


def save(config, model_class, folder):
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    return open_model(folder)


def test_a_backbones_task_layers_are_trained_and_a_language_model_has_none(tmp_path):
    from transformers import BertForSequenceClassification, GPT2LMHeadModel  # noqa: PLC0415 - heavy

    labels = save(BertConfig(**BERT, vocab_size=31), BertForSequenceClassification, tmp_path / "labels")
    spec = make_backbone_spec(labels, auto_class=ROWS, seed=5, config_overrides={"num_labels": 3})
    assert (spec.method, spec.seed) == ("head", 5)
    text = save(GPT2Config(**GPT2, vocab_size=31), GPT2LMHeadModel, tmp_path / "text")
    spec = make_backbone_spec(text, auto_class=TEXT, seed=5)
    assert (spec.method, spec.seed) == ("none", 5)


def test_a_ladder_that_would_start_above_the_model_is_refused():
    spec = spec_of(GPT2Config(**GPT2), TEXT)
    for first_layer in (0, 3):
        side = msgspec.structs.replace(SideSpec(), first_layer=first_layer)
        with pytest.raises(RecipeError, match=f"first layer is {first_layer}, and the model has the layers 1 to 2"):
            build_side_model(spec, side, None)
