from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from coterie.jobs.model_spec import ModelSpec
from coterie.models import FolderWeights, load_whole_model, make_model_spec, named_by_unit, open_model
from coterie.models.new_layers import new_parameter
from coterie.models.skeleton import empty_model

TAGS = "AutoModelForTokenClassification"


@pytest.mark.parametrize(("kind", "scale"), [("bert", 0.02), ("roberta", 0.05), ("electra", 0.02)])
def test_a_new_classifier_has_the_distribution_of_the_models_own_code(kind: str, scale: float) -> None:
    config = AutoConfig.for_model(
        kind, hidden_size=400, num_hidden_layers=1, num_attention_heads=4, num_labels=50, initializer_range=scale
    )
    model = empty_model(ModelSpec(config_json=config.to_json_string(), auto_class=TAGS))
    weight = new_parameter(model, "classifier.weight", seed=3)
    assert weight.std().item() == pytest.approx(scale, rel=0.03)
    assert abs(weight.mean().item()) < scale * 0.05
    assert not new_parameter(model, "classifier.bias", seed=3).any()


def test_layers_that_the_family_treats_in_its_parent_are_initialised_too() -> None:
    config = AutoConfig.for_model(
        "modernbert", hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_labels=40, intermediate_size=64
    )
    model = empty_model(ModelSpec(config_json=config.to_json_string(), auto_class=TAGS))
    weight = new_parameter(model, "classifier.weight", seed=3)
    # The family's own rule: 1 / sqrt(hidden size), cut off at twice that, which leaves 0.88 of it.
    assert weight.abs().max() <= 2 * 256**-0.5
    assert weight.std().item() == pytest.approx(0.88 * 256**-0.5, rel=0.02)
    assert torch.equal(new_parameter(model, "head.norm.weight", seed=3), torch.ones(256))


def test_the_empty_model_is_unchanged_afterwards() -> None:
    config = AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = empty_model(ModelSpec(config_json=config.to_json_string(), auto_class=TAGS))
    new_parameter(model, "classifier.weight", seed=3)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_whole_model_starts_with_the_same_new_layer_and_the_folders_other_weights(bert_base: Path) -> None:
    source = open_model(bert_base)
    spec = make_model_spec(source, auto_class=TAGS, config_overrides={"num_labels": 7}, seed=5)
    weights = FolderWeights(source, spec)
    whole = named_by_unit(load_whole_model(spec, weights))
    staged = weights.get(whole)
    assert whole["classifier.weight"].shape == (7, 32)
    assert all(torch.equal(whole[name], staged[name]) for name in staged)
