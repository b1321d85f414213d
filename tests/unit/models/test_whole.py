import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coterie.errors import ModelError
from coterie.jobs.model_spec import LoraSpec
from coterie.models import (
    FolderWeights,
    MappingWeights,
    RandomKey,
    describe,
    load_whole_model,
    make_model_spec,
    named_by_unit,
    open_model,
    seed_by_key,
)

TAGS = "AutoModelForTokenClassification"
TEXT = "AutoModelForCausalLM"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_whole_model_from_a_mapping_equals_one_from_the_folder(
    tied_llama: Path, method: str, inputs: dict[str, torch.Tensor]
) -> None:
    source = open_model(tied_llama)
    lora = LoraSpec(rank=2) if method == "lora" else None
    spec = make_model_spec(source, auto_class=TEXT, config_overrides={}, seed=1, method=method, lora=lora)  # type: ignore[arg-type]
    weights = FolderWeights(source, spec)
    one = load_whole_model(spec, weights)
    anatomy = describe(spec)
    other = load_whole_model(spec, MappingWeights(weights.get(anatomy.unit_of)))
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert {n: p.requires_grad for n, p in named_by_unit(one).items()} == {
        n: p.requires_grad for n, p in named_by_unit(other).items()
    }
    assert {n for n, p in named_by_unit(one).items() if p.requires_grad} == anatomy.trainable_names
    assert torch.equal(one(**inputs).logits, other(**inputs).logits)


def test_generation_keeps_its_cache_only_when_asked(tied_llama: Path) -> None:
    source = open_model(tied_llama)
    spec = make_model_spec(source, auto_class=TEXT, config_overrides={}, seed=1)
    weights = FolderWeights(source, spec)
    assert load_whole_model(spec, weights).config.use_cache is False
    assert load_whole_model(spec, weights, use_cache=True).config.use_cache is True


def test_a_whole_model_draws_its_dropout_from_the_key(bert_tags: Path, inputs: dict[str, torch.Tensor]) -> None:
    source = open_model(bert_tags)
    spec = make_model_spec(source, auto_class=TAGS, config_overrides={}, seed=1)
    model = load_whole_model(spec, FolderWeights(source, spec))
    set_key = seed_by_key(model, describe(spec))
    results = []
    for micro_batch in (0, 1, 0):
        set_key(RandomKey(seed=1, step=2, micro_batch=micro_batch))
        results.append(model(**inputs).logits)
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def test_a_folder_with_another_classifier_is_a_model_error(bert_tags: Path) -> None:
    source = open_model(bert_tags)
    spec = make_model_spec(source, auto_class=TAGS, config_overrides={"num_labels": 3}, seed=1)
    with pytest.raises(ModelError):
        load_whole_model(spec, FolderWeights(source, spec))


def test_loading_a_whole_model_prints_nothing(bert_base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = open_model(bert_base)
    spec = make_model_spec(source, auto_class=TAGS, config_overrides={}, seed=1)
    capfd.readouterr()
    load_whole_model(spec, FolderWeights(source, spec))
    assert capfd.readouterr() == ("", "")


def test_importing_the_folder_does_not_load_transformers_or_peft() -> None:
    code = "import sys, coterie.models; print(sorted({'transformers', 'peft', 'safetensors'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
