"""What is exported to GGUF is read back by transformers with equal logits and tokens, and by us as a model again."""

from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from coterie.checkpoint.export import ExportOptions, export_model
from coterie.checkpoint.gguf_export import GgufOptions, export_gguf
from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.store import CheckpointStore
from coterie.checkpoint.weights import unit_shapes
from coterie.errors import StorageError, UnsupportedModelError, UsageError
from coterie.ids import RunId
from coterie.jobs.model_spec import LoraSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import FolderWeights, make_model_spec, open_model
from coterie.tasks.tokenizer import load_tokenizer

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
FAMILIES = {
    "llama": ("llama", {}),
    "llama tied, biased, wide heads": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
TEXT = "The 12 foxes at 1.5 <|im_end|> naïve ü"
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def tokenizer(make_gguf) -> PreTrainedTokenizerFast:
    return load_tokenizer(make_gguf("llama")).hf


def trained(tmp_path, tokenizer, kind="llama", settings=None, lora=None, auto_class="AutoModelForCausalLM"):
    """A pretrained folder and a checkpoint of weights that have moved."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer) + 5, **{**SHAPE, **(settings or {})})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return moved(tmp_path, open_model(tmp_path / "base"), lora, auto_class)


def moved(tmp_path, source, lora=None, auto_class="AutoModelForCausalLM"):
    spec = make_model_spec(source, auto_class=auto_class, config_overrides={}, seed=0,
                           method="lora" if lora else "full", lora=lora)  # fmt: skip
    shapes = unit_shapes(spec)
    generator = torch.Generator().manual_seed(2)
    weights = FolderWeights(source, spec)
    terms = RunTerms(run_id=RunId("r"), model=spec, optimizer=OptimizerSpec(), seed=0, batch_rows=2, micro_batches=1,
                     schedule="flush")  # fmt: skip
    with CheckpointStore(tmp_path / "checkpoints").begin(1, shapes) as writer:
        for unit, named in shapes.items():
            tensors = weights.get(named)
            writer.write_unit(
                unit, {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}, {}
            )
        checkpoint = writer.commit(Manifest(terms=terms, global_step=1, epoch=0, data_position=1, samples_seen=2))
    return source, checkpoint


def logits(model) -> torch.Tensor:
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def read_by_transformers(path, config=None):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_float32_file_has_the_logits_of_the_exported_folder(tmp_path, tokenizer, name):
    kind, settings = FAMILIES[name]
    source, checkpoint = trained(tmp_path, tokenizer, kind, settings)
    path = export_gguf(source, checkpoint, tokenizer, tmp_path / "m.gguf", GgufOptions(dtype="float32"))
    folder = export_model(source, checkpoint, tokenizer, tmp_path / "folder")
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    again = open_model(path)
    alone = name in {"llama", "mistral", "qwen2"}  # of the others transformers' own config loses something
    theirs = read_by_transformers(path, None if alone else again.config)
    assert torch.equal(logits(theirs), expected)
    assert load_tokenizer(path).hf(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert load_tokenizer(path).hf.chat_template == tokenizer.chat_template


def test_adapters_are_merged_into_the_file(tmp_path, tokenizer):
    source, checkpoint = trained(tmp_path, tokenizer, lora=LoraSpec(rank=2, alpha=4))
    path = export_gguf(source, checkpoint, tokenizer, tmp_path / "m.gguf", GgufOptions(dtype="float32"))
    folder = export_model(source, checkpoint, tokenizer, tmp_path / "folder", ExportOptions(merge=True))
    assert torch.equal(logits(read_by_transformers(path)), logits(AutoModelForCausalLM.from_pretrained(folder)))


def test_an_adapter_of_a_gguf_file_loads_on_what_transformers_makes_of_it_as_its_card_says(
    tmp_path, tokenizer, make_gguf
):
    source, checkpoint = moved(tmp_path, open_model(make_gguf("llama", "Q8_0")), LoraSpec(rank=2, alpha=4))
    folder = export_model(source, checkpoint, tokenizer, tmp_path / "folder")
    merged = export_model(source, checkpoint, tokenizer, tmp_path / "merged", ExportOptions(merge=True))
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(folder)), names)  # noqa: S102 - what a reader of the card would run
    expected = logits(AutoModelForCausalLM.from_pretrained(merged))
    torch.testing.assert_close(logits(names["model"]), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(read_by_transformers(source.gguf_file)), expected, atol=1e-3)


@pytest.mark.parametrize(("dtype", "worst"), [("float16", 1e-3), ("bfloat16", 5e-3), ("q8_0", 6e-3)])
def test_smaller_types_are_the_model_rounded(tmp_path, tokenizer, dtype, worst):
    source, checkpoint = trained(tmp_path, tokenizer)
    path = export_gguf(source, checkpoint, tokenizer, tmp_path / "m.gguf", GgufOptions(dtype=dtype))
    folder = export_model(source, checkpoint, None, tmp_path / "folder")
    rounded = read_by_transformers(path).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        if tensor.ndim == 1:
            assert torch.equal(rounded[name], tensor)
        else:
            assert 0 < (rounded[name] - tensor).abs().max() <= worst * tensor.abs().max()


def test_an_exported_file_is_a_model_source_again(tmp_path, tokenizer):
    source, checkpoint = trained(tmp_path, tokenizer)
    path = export_gguf(source, checkpoint, tokenizer, tmp_path / "m.gguf", GgufOptions(dtype="float32"))
    (tmp_path / "second").mkdir()
    again, second = moved(tmp_path / "second", open_model(path))
    folder = export_model(again, second, load_tokenizer(path).hf, tmp_path / "second" / "folder")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not getattr(model, "is_quantized", False)
    assert not torch.equal(logits(model), logits(read_by_transformers(path)))


def test_the_file_says_what_llama_cpp_wants_to_know(tmp_path, tokenizer):
    source, checkpoint = trained(tmp_path, tokenizer, "mistral", {"sliding_window": 32})
    path = export_gguf(source, checkpoint, tokenizer, tmp_path / "my-model.gguf", GgufOptions(dtype="q8_0"))
    facts = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert facts["general.architecture"] == "llama"
    assert facts["general.name"] == "my-model"
    assert facts["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert facts["llama.context_length"] == 32
    assert facts["tokenizer.ggml.pre"] == "smollm"
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == len(tokenizer) + 5
    assert (tokens[2], kinds[2], kinds[-1]) == ("<|im_end|>", gguf.TokenType.CONTROL, gguf.TokenType.UNUSED)
    assert facts["tokenizer.ggml.add_bos_token"] is False


def test_other_families_are_refused_naming_those_that_can_be_written(tmp_path, tokenizer):
    source, checkpoint = trained(tmp_path, tokenizer, "olmo2", {"pad_token_id": 0})
    with pytest.raises(UnsupportedModelError, match="olmo2 models cannot be written") as refusal:
        export_gguf(source, checkpoint, tokenizer, tmp_path / "m.gguf")
    assert "llama, mistral, qwen2, qwen3" in (refusal.value.hint or "")
    assert not list(tmp_path.glob("m.gguf*"))


def test_settings_that_the_file_cannot_hold_are_refused_and_nothing_is_left(tmp_path, tokenizer):
    source, checkpoint = trained(
        tmp_path, tokenizer, settings={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    )
    with pytest.raises(UnsupportedModelError, match=r"scales its positions \(linear\)"):
        export_gguf(source, checkpoint, tokenizer, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("m.gguf*"))


def test_a_classifier_is_refused(tmp_path, tokenizer):
    source, checkpoint = trained(
        tmp_path, tokenizer, settings={"pad_token_id": 0}, auto_class="AutoModelForSequenceClassification"
    )
    with pytest.raises(UsageError, match="generate text"):
        export_gguf(source, checkpoint, tokenizer, tmp_path / "m.gguf")


def test_a_file_that_is_there_is_replaced_only_if_that_was_allowed(tmp_path, tokenizer):
    source, checkpoint = trained(tmp_path, tokenizer)
    out = tmp_path / "m.gguf"
    out.write_text("mine")
    with pytest.raises(StorageError, match="is there already"):
        export_gguf(source, checkpoint, tokenizer, out)
    assert out.read_text() == "mine"
    export_gguf(source, checkpoint, tokenizer, out, GgufOptions(overwrite=True))
    assert out.read_bytes()[:4] == b"GGUF"


def test_a_tokenizer_that_splits_words_is_refused(tmp_path, tokenizer):
    from tokenizers import Tokenizer, models  # noqa: PLC0415 - only here

    source, checkpoint = trained(tmp_path, tokenizer)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
    with pytest.raises(UnsupportedModelError, match="WordLevel"):
        export_gguf(source, checkpoint, words, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("m.gguf*"))
