"""Tiny random models, saved once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}

SaveModel = Callable[..., Path]


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """Saves a random model and returns its folder: `save_model("bert", "AutoModel", hidden_size=16, save={...})`."""

    def save(kind: str, auto_class: str, *, save: dict[str, Any] | None = None, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **{**SHAPE, "pad_token_id": 0, **settings})
        getattr(transformers, auto_class).from_config(config).save_pretrained(folder, **(save or {}))
        return folder

    return save


@pytest.fixture(scope="session")
def bert_base(save_model: SaveModel) -> Path:
    """A BERT without a task layer, as pretrained models come."""
    return save_model("bert", "AutoModel")


@pytest.fixture(scope="session")
def bert_tags(save_model: SaveModel) -> Path:
    return save_model("bert", "AutoModelForTokenClassification", num_labels=5)


@pytest.fixture(scope="session")
def tied_llama(save_model: SaveModel) -> Path:
    return save_model("llama", "AutoModelForCausalLM", num_key_value_heads=2, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def inputs() -> dict[str, torch.Tensor]:
    """Two rows, the second padded."""
    ids = torch.arange(4, 16).reshape(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}
