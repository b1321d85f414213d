"""Which trained state a worker may have copies of."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from coterie.checkpoint.shard_file import state_digest
from coterie.coordinator.replicas import Replica
from coterie.coordinator.shards import ShardSource
from coterie.jobs.model_spec import ModelSpec
from coterie.models.stage import build_stage
from coterie.models.weights import MappingWeights
from coterie.worker.trained_state import by_unit


@pytest.mark.parametrize("tied", [True, False])
def test_a_worker_is_asked_for_what_its_copies_can_be(tied: bool) -> None:
    """A tied matrix travels with both ends of the model, and is in the copies of the first alone."""
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 23}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied)
    spec = ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForCausalLM", method="full")
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    weights = MappingWeights({name: parameter.detach() for name, parameter in model.named_parameters()})
    stages = [build_stage(spec, first, stop, weights) for first, stop in ((0, 2), (2, 4))]
    copies = {unit: tensors for stage in stages for unit, tensors in by_unit(stage, stage.trainable(), {}).items()}
    assert copies.keys() == {0, 1, 2, 3}
    source = ShardSource(spec, weights, Replica(5, copies))
    assert source.trained_units == ({0, 1, 2} if tied else {0, 1, 2, 3})
    for unit in source.trained_units:
        assert source.trained_unit(unit).digest == state_digest(copies[unit])
