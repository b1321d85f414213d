"""An exported folder gives plain transformers and plain PEFT the logits of the trained weights, bit for bit."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from coterie.checkpoint.export import ExportOptions, export_model
from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.model_card import CardFacts
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.store import CheckpointStore
from coterie.checkpoint.weights import CheckpointWeights, unit_shapes
from coterie.errors import CoterieError, ModelError, StorageError, UsageError
from coterie.ids import RunId
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models.anatomy import describe
from coterie.models.source import ModelSource, open_model
from coterie.models.spec import make_model_spec
from coterie.models.weights import FolderWeights

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
MOE = {**BASE, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
QWEN_MOE = {**BASE, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "head_dim": 8, "decoder_sparse_step": 1, "pad_token_id": 0}  # fmt: skip
TAGS = "AutoModelForTokenClassification"
CAUSAL = "AutoModelForCausalLM"
CLASSES = "AutoModelForSequenceClassification"

FAMILIES = {
    "bert": ("bert", TAGS, BASE),
    "roberta": ("roberta", TAGS, {**BASE, "pad_token_id": 1}),
    "distilbert": ("distilbert", TAGS, {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 61}),
    "llama-tags": ("llama", TAGS, {**BASE, "num_key_value_heads": 2}),
    "llama-tied": ("llama", CAUSAL, {**BASE, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gpt2-tied": ("gpt2", CAUSAL, {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "n_positions": 40}),
    "mixtral": ("mixtral", CAUSAL, MOE),
    "qwen3-moe": ("qwen3_moe", CAUSAL, QWEN_MOE),
    "roberta-classes": ("roberta", CLASSES, {**BASE, "pad_token_id": 1}),
    "gpt2-classes": ("gpt2", CLASSES, {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "pad_token_id": 0}),
    "llama-classes": ("llama", CLASSES, {**BASE, "num_key_value_heads": 2, "pad_token_id": 0}),
}
quiet_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:fan_in_fan_out")
"""For tests that call PEFT themselves."""
LABELS = {"id2label": {i: f"L{i}" for i in range(5)}, "label2id": {f"L{i}": i for i in range(5)}}


@dataclass(frozen=True)
class Trained:
    """A pretrained folder, a spec, and a checkpoint of weights that have moved."""

    source: ModelSource
    spec: ModelSpec
    checkpoint: Checkpoint
    moved: dict[str, torch.Tensor]


def pretrained_folder(folder: Path, family: str) -> tuple[Path, str]:
    """A tiny random model without the task's layers, as one gets it from a hub."""
    kind, auto_class, values = FAMILIES[family]
    torch.manual_seed(3)
    save_class = transformers.AutoModelForCausalLM if auto_class == CAUSAL else transformers.AutoModel
    save_class.from_config(AutoConfig.for_model(kind, **values)).save_pretrained(folder)
    return folder, auto_class


def trained(tmp_path: Path, family: str, method: str = "full", frozen: tuple[str, ...] = ()) -> Trained:
    folder, auto_class = pretrained_folder(tmp_path / "base", family)
    source = open_model(str(folder))
    lora = LoraSpec(rank=4, alpha=8) if method == "lora" else None
    spec = make_model_spec(source, auto_class=auto_class, config_overrides={} if auto_class == CAUSAL else LABELS,
                           seed=5, method=method, lora=lora, frozen_patterns=frozen)  # fmt: skip
    shapes = unit_shapes(spec)
    generator = torch.Generator().manual_seed(11)
    names = [name for unit in shapes.values() for name in unit]
    moved = {name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
             for name, tensor in FolderWeights(source, spec).get(names).items()}  # fmt: skip
    store = CheckpointStore(tmp_path / "checkpoints")
    with store.begin(7, shapes) as writer:
        for unit, named in shapes.items():
            writer.write_unit(unit, {name: moved[name] for name in named}, {})
        checkpoint = writer.commit(manifest_of(spec))
    return Trained(source, spec, checkpoint, moved)


def manifest_of(spec: ModelSpec) -> Manifest:
    terms = RunTerms(run_id=RunId("r"), model=spec, optimizer=OptimizerSpec(), seed=5, batch_rows=8, micro_batches=2,
                     schedule="flush")  # fmt: skip
    return Manifest(terms=terms, global_step=7, epoch=0, data_position=7, samples_seen=56, loss_tail=(1.25,))


def plain_model(case: Trained) -> torch.nn.Module:
    """The trained weights in memory, put there without any of the code under test."""
    auto = getattr(transformers, case.spec.auto_class)
    config = AutoConfig.for_model(**json.loads(case.spec.config_json))
    model = auto.from_config(config)
    new = FolderWeights(case.source, case.spec).new_layers
    loaded = auto.from_pretrained(case.source.folder, config=config)
    model.load_state_dict(loaded.state_dict())
    values = {**FolderWeights(case.source, case.spec).get(new), **case.moved}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.copy_(values[name])
    return model.eval()


def peft_model(case: Trained) -> torch.nn.Module:
    """The plain pretrained model with PEFT's own adapters on it, and the trained numbers in them."""
    lora = case.spec.lora
    model = plain_model(case)
    wrapped = get_peft_model(
        model, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules))
    )
    found = 0
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            key = name.removeprefix("base_model.model.").replace(".default.", ".")
            if ".lora_" in key:
                parameter.copy_(case.moved[key])
                found += 1
    assert found == 2 * len(lora.target_modules)
    return wrapped.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


def load_plain(case: Trained, folder: Path) -> torch.nn.Module:
    return getattr(transformers, case.spec.auto_class).from_pretrained(folder).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_export_loads_in_plain_transformers_with_equal_logits(tmp_path, family):
    case = trained(tmp_path, family)
    out = export_model(case.source, case.checkpoint, None, tmp_path / "out")
    loaded, info = getattr(transformers, case.spec.auto_class).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded.eval()), logits(plain_model(case)))
    assert not torch.equal(logits(loaded), logits(load_plain_base(case)))
    original = AutoConfig.for_model(**json.loads(case.spec.config_json))
    assert getattr(loaded.config, "use_cache", None) == getattr(original, "use_cache", None)
    if case.spec.auto_class != CAUSAL:
        assert loaded.config.id2label == LABELS["id2label"]


def load_plain_base(case: Trained) -> torch.nn.Module:
    config = AutoConfig.for_model(**json.loads(case.spec.config_json))
    return getattr(transformers, case.spec.auto_class).from_pretrained(case.source.folder, config=config).eval()


@quiet_peft
@pytest.mark.parametrize(
    "family",
    [
        *("bert", "llama-tags", "llama-tied", "gpt2-tied", "mixtral", "qwen3-moe", "roberta-classes", "gpt2-classes"),
        "llama-classes",
    ],
)
def test_an_adapter_folder_loads_in_plain_peft_with_equal_logits(tmp_path, family):
    case = trained(tmp_path, family, "lora")
    out = export_model(case.source, case.checkpoint, None, tmp_path / "out")
    base = getattr(transformers, case.spec.auto_class).from_pretrained(
        case.source.folder, config=AutoConfig.from_pretrained(out)
    )
    loaded = PeftModel.from_pretrained(base, out).eval()
    assert torch.equal(logits(loaded), logits(peft_model(case)))
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(case.source.folder.resolve())
    with safe_open(out / "adapter_model.safetensors", framework="pt") as file:
        assert all(key.startswith("base_model.model.") for key in file.keys())  # noqa: SIM118 - not a dict
    assert not (out / "model.safetensors").exists()


@quiet_peft
@pytest.mark.parametrize("family", ["bert", "llama-tied", "gpt2-tied", "roberta-classes"])
def test_a_merged_export_equals_pefts_own_merge(tmp_path, family):
    case = trained(tmp_path, family, "lora")
    out = export_model(case.source, case.checkpoint, None, tmp_path / "out", ExportOptions(merge=True))
    merged = peft_model(case).merge_and_unload()
    loaded = load_plain(case, out)
    assert torch.equal(logits(loaded), logits(merged.eval()))
    torch.testing.assert_close(logits(loaded), logits(peft_model(case)), rtol=1e-4, atol=1e-5)
    assert not (out / "adapter_config.json").exists()


def test_frozen_parameters_come_from_the_model_folder(tmp_path):
    case = trained(tmp_path, "bert", frozen=("embedding", "block 0"))
    assert not any("layer.0." in name for name in case.moved)
    out = export_model(case.source, case.checkpoint, None, tmp_path / "out")
    assert torch.equal(logits(load_plain(case, out)), logits(plain_model(case)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_export_is_the_rounded_model(tmp_path, dtype):
    case = trained(tmp_path, "llama-tied")
    out = export_model(case.source, case.checkpoint, None, tmp_path / "out", ExportOptions(dtype=dtype))
    loaded = load_plain(case, out)
    assert loaded.dtype == getattr(torch, dtype)
    wanted = plain_model(case).to(loaded.dtype).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


@quiet_peft
def test_a_merged_export_in_half_precision_is_merged_before_it_is_rounded(tmp_path):
    case = trained(tmp_path, "bert", "lora")
    out = export_model(
        case.source, case.checkpoint, None, tmp_path / "out", ExportOptions(merge=True, dtype="bfloat16")
    )
    wanted = peft_model(case).merge_and_unload().to(torch.bfloat16).state_dict()
    loaded = load_plain(case, out).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.items())


def test_weights_that_float16_cannot_hold_are_refused_and_nothing_is_written(tmp_path):
    case = trained(tmp_path, "bert")
    case.moved["classifier.bias"][0] = 1e6
    store = CheckpointStore(tmp_path / "big")
    shapes = unit_shapes(case.spec)
    with store.begin(7, shapes) as writer:
        for unit, named in shapes.items():
            writer.write_unit(unit, {name: case.moved[name] for name in named}, {})
        checkpoint = writer.commit(manifest_of(case.spec))
    with pytest.raises(UsageError, match=r"classifier.bias holds 1e\+06"):
        export_model(case.source, checkpoint, None, tmp_path / "out", ExportOptions(dtype="float16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "big", "checkpoints"]


def test_large_weights_are_sharded_by_transformers_rules(tmp_path):
    case = trained(tmp_path, "bert")
    out = export_model(case.source, case.checkpoint, None, tmp_path / "out", ExportOptions(max_shard_bytes=20_000))
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(load_plain(case, out)), logits(plain_model(case)))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - only here

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "hello": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_tokenizer_and_card_go_with_the_model(tmp_path, method):
    case = trained(tmp_path, "bert", method)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    facts = CardFacts(data="wikigold | train", metrics={"test entity F1": 0.7234})
    options = ExportOptions(facts=facts, base_name="someone/tiny-bert")
    for name, tokenizer in (("a", tiny_tokenizer()), ("b", tmp_path / "tokenizer")):
        out = export_model(case.source, case.checkpoint, tokenizer, tmp_path / name, options)
        assert AutoTokenizer.from_pretrained(out)("hello you")["input_ids"] == [2, 1]
        assert AutoTokenizer.from_pretrained(out).pad_token == "[PAD]"
        card = (out / "README.md").read_text()
        assert 'base_model: "someone/tiny-bert"' in card
        assert "wikigold \\| train" in card
        assert "| test entity F1 | 0.7234 |" in card
        assert ("PeftModel" in card) is (method == "lora")
    if method == "lora":
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/tiny-bert"


def test_an_export_replaces_its_own_folder_but_nobody_elses(tmp_path):
    case = trained(tmp_path, "bert")
    out = tmp_path / "out"
    export_model(case.source, case.checkpoint, tiny_tokenizer(), out)
    export_model(case.source, case.checkpoint, None, out)
    assert not (out / "tokenizer.json").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"1 files .* such as notes.txt"):
        export_model(case.source, case.checkpoint, None, out)
    assert (out / "notes.txt").read_text() == "mine"
    export_model(case.source, case.checkpoint, None, out, ExportOptions(overwrite=True))
    assert not (out / "notes.txt").exists()
    assert (tmp_path / "out.old" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoints", "out", "out.old"]


@pytest.mark.parametrize("where", ["base", ".", "checkpoints/step-000007"])
def test_an_export_never_takes_the_place_of_what_it_reads(tmp_path, where):
    case = trained(tmp_path, "bert")
    with pytest.raises(UsageError, match="is or contains"):
        export_model(case.source, case.checkpoint, None, tmp_path / where, ExportOptions(overwrite=True))


def test_a_failed_export_leaves_the_old_folder_and_no_leftovers(tmp_path):
    case = trained(tmp_path, "bert")
    out = export_model(case.source, case.checkpoint, None, tmp_path / "out")
    before = sorted(path.name for path in out.iterdir())

    class Broken:
        def save_pretrained(self, save_directory: str) -> None:
            (Path(save_directory) / "half").write_text("x")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        export_model(case.source, case.checkpoint, Broken(), out)
    assert sorted(path.name for path in out.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoints", "out"]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    case = trained(tmp_path, "bert")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        export_model(case.source, case.checkpoint, tmp_path / "empty", tmp_path / "out")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    case = trained(tmp_path, "bert")
    folder, _ = pretrained_folder(tmp_path / "other", "llama-tied")
    with pytest.raises(CoterieError):
        export_model(
            open_model(str(folder)),
            trained(tmp_path / "x", "bert", frozen=("embedding",)).checkpoint,
            None,
            tmp_path / "out",
        )
    assert case.checkpoint.units


def test_a_checkpoint_that_holds_everything_needs_nothing_from_the_folder(tmp_path):
    case = trained(tmp_path, "bert", frozen=("embedding",))
    shapes = unit_shapes(case.spec, everything=True)
    tensors = CheckpointWeights(case.checkpoint, FolderWeights(case.source, case.spec)).get(describe(case.spec).unit_of)
    with CheckpointStore(tmp_path / "all").begin(7, shapes) as writer:
        for unit, named in shapes.items():
            writer.write_unit(unit, {name: tensors[name] for name in named}, {})
        checkpoint = writer.commit(msgspec.structs.replace(manifest_of(case.spec), base_model="tiny"))

    class Nothing:
        def get(self, names):
            raise AssertionError(f"asked for {list(names)}")

    again = CheckpointWeights(checkpoint, Nothing()).get(tensors)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
