"""What a model folder says of itself, read without torch."""

import json
import struct

import pytest

from coterie.config.forward import forward_recipe
from coterie.config.model_look import count_parameters, look_at_model, task_of_config
from coterie.errors import ModelError, UnsupportedModelError


def save(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def save_header(path, header):
    body = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body)


def test_an_encoder_with_its_size(tmp_path):
    name = save(tmp_path / "m", model_type="bert", hidden_size=8, max_position_embeddings=16)
    header = {"__metadata__": {"format": "pt"}, "a": {"shape": [3, 8]}, "b": {"shape": []}}
    save_header(tmp_path / "m" / "model.safetensors", header)
    look = look_at_model(name)
    assert (look.direction, look.width, look.context, look.parameters) == ("encoder", 8, 16, 25)
    assert look.describe() == "bert (encoder, width 8, 0.0 M parameters)"


@pytest.mark.parametrize("config", [{"model_type": "gpt2", "n_embd": 8}, {"model_type": "opt", "hidden_size": 8}])
def test_what_is_no_encoder_generates(tmp_path, config):
    look = look_at_model(save(tmp_path / "m", **config))
    assert (look.direction, look.width, look.parameters) == ("decoder", 8, None)


def test_a_chat_template_is_found_in_either_place(tmp_path):
    name = save(tmp_path / "m", model_type="llama")
    assert not look_at_model(name).chat_template
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert look_at_model(name).chat_template


def test_a_name_on_the_hub_is_not_looked_at():
    assert look_at_model("some-one/some-model") is None


def test_damaged_weights_count_as_unknown(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert count_parameters(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "error", "word"),
    [
        ({}, ModelError, "model type"),
        ({"model_type": "t5", "is_encoder_decoder": True}, UnsupportedModelError, "encoder-decoder"),
        ({"model_type": "albert"}, UnsupportedModelError, "same layer"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_with_the_reason(tmp_path, config, error, word):
    with pytest.raises(error, match=word):
        look_at_model(save(tmp_path / "m", **config))


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "token-classification"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
            "sequence-classification",
        ),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, "regression"),
        ({"architectures": ["BertForSequenceClassification"], "problem_type": "regression"}, "regression"),
        ({"architectures": ["LlamaForCausalLM"]}, "causal-lm"),
        ({"architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"architectures": ["BertModel"]}, None),
        ({"architectures": None}, None),
        ({}, None),
    ],
)
def test_a_class_says_what_a_model_was_trained_for(config, task):
    assert task_of_config(config) == task


def test_predicting_takes_the_task_from_the_folder_unless_told(tmp_path):
    name = save(tmp_path / "m", model_type="bert", architectures=["BertForSequenceClassification"])
    assert forward_recipe(name, "d", {}).data.task == "sequence-classification"
    assert forward_recipe(name, "d", {"task": "token-classification"}).data.task == "token-classification"
    record = {"coterie": "0", "run_id": "r", "step": 1, "files": [], "task": "regression"}
    (tmp_path / "m" / "coterie.json").write_text(json.dumps(record))
    assert forward_recipe(name, "d", {}).data.task == "regression"
