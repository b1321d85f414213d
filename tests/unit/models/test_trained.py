"""Folders of trained models: plain, and PEFT's, whose adapters are merged as PEFT merges them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from coterie.errors import ModelError, UnsupportedModelError
from coterie.models import describe, load_whole_model, make_forward_spec
from coterie.models.trained import ADAPTER_CONFIG, open_trained

TAGS = "AutoModelForTokenClassification"
# PEFT asks transformers for an attribute by its old name; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.fixture
def save_adapter(save_model: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Saves a PEFT folder with random adapters; gives it and the PEFT model."""

    def save(kind: str, targets: list[str], **settings: Any) -> tuple[Path, Any]:
        base = save_model(kind, TAGS, num_labels=3)
        model = AutoModelForTokenClassification.from_pretrained(base)
        config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, modules_to_save=["classifier"], **settings)
        wrapped = peft.get_peft_model(model, config)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        folder = tmp_path / "adapter"
        wrapped.save_pretrained(folder)
        wrapped.config.save_pretrained(folder)
        return folder, wrapped.eval()

    return save


@pytest.mark.parametrize(
    ("kind", "targets", "settings"),
    [
        ("bert", ["query", "value"], {}),
        ("bert", ["query", "dense"], {"use_rslora": True}),
        ("gpt2", ["c_attn"], {"fan_in_fan_out": True}),
        ("bert", ["query", "dense"], {"use_dora": True}),
        ("gpt2", ["c_attn"], {"fan_in_fan_out": True, "use_dora": True, "use_rslora": True}),
    ],
)
def test_adapters_are_merged_as_peft_does(
    save_adapter: Callable[..., tuple[Path, Any]], kind: str, targets: list[str], settings: dict[str, Any]
) -> None:
    folder, wrapped = save_adapter(kind, targets, **settings)
    trained = open_trained(folder)
    spec = make_forward_spec(trained.source, auto_class=TAGS)
    model = load_whole_model(spec, trained.weights(spec)).eval()
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    with torch.no_grad():
        assert torch.allclose(model(**inputs).logits, wrapped(**inputs).logits, atol=1e-5)


def test_nothing_is_trained_in_a_forward_spec(save_model: Callable[..., Path]) -> None:
    trained = open_trained(save_model("bert", TAGS, num_labels=3))
    spec = make_forward_spec(trained.source, auto_class=TAGS)
    assert describe(spec).trainable_names == frozenset()
    model = load_whole_model(spec, trained.weights(spec))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_base_model_has_no_trained_classifier(bert_base: Path) -> None:
    trained = open_trained(bert_base)
    spec = make_forward_spec(trained.source, auto_class=TAGS)
    with pytest.raises(ModelError, match=r"holds no classifier\.\w+: it was not trained for this task"):
        trained.weights(spec)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_dora": True}, ModelError, "DoRA's by its config or by its weights, and not by both"),
        ({"peft_type": "IA3"}, UnsupportedModelError, "peft_type = IA3"),
        ({"bias": "all"}, UnsupportedModelError, "bias = all"),
        ({"alpha_pattern": {"query": 3}}, UnsupportedModelError, "alpha_pattern"),
        ({"base_model_name_or_path": "/no/such/base"}, ModelError, "base model of the adapter"),
        ({"base_model_name_or_path": None}, ModelError, "names no base model"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused_with_the_reason(
    save_adapter: Callable[..., tuple[Path, Any]], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder, _ = save_adapter("bert", ["query"])
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings | change))
    with pytest.raises(error, match=message):
        use(folder)


def test_a_damaged_adapter_is_named(save_adapter: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = save_adapter("bert", ["query"])
    (folder / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        use(folder)


def use(folder: Path) -> None:
    trained = open_trained(folder)
    trained.weights(make_forward_spec(trained.source, auto_class=TAGS))


def test_an_adapter_at_one_end_of_a_tied_matrix_is_not_merged_into_both(tied_llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied_llama)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    trained = open_trained(tmp_path / "adapter")
    spec = make_forward_spec(trained.source, auto_class="AutoModelForCausalLM")
    with pytest.raises(UnsupportedModelError, match="which both ends of the model use, at one end only"):
        trained.weights(spec)
