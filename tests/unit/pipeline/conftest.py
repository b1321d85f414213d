import json
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForTokenClassification, BertConfig

from coterie.jobs.model_spec import ModelSpec
from coterie.models import MappingWeights, StageModule, build_stage, describe


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    """BERT with two blocks, four units, dropout on."""
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=23,
        max_position_embeddings=16,
        num_labels=3,
    )
    return ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForTokenClassification", seed=3)


@pytest.fixture
def stage_of(tiny_spec: ModelSpec) -> Callable[[int, int], StageModule]:
    """Builds units [first, stop) of the tiny model with its random weights, equal at every call."""

    def build(first_unit: int, stop_unit: int) -> StageModule:
        torch.manual_seed(0)
        model = AutoModelForTokenClassification.from_config(BertConfig.from_dict(json.loads(tiny_spec.config_json)))
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assert tensors.keys() == describe(tiny_spec).unit_of.keys()
        return build_stage(tiny_spec, first_unit, stop_unit, MappingWeights(tensors))

    return build
