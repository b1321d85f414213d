"""Low-rank adapters of every variant: begun as PEFT begins them, exported for PEFT, and merged as PEFT merges them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig

from coterie.checkpoint.export import ExportOptions, export_model
from coterie.checkpoint.manifest import Manifest, RunTerms
from coterie.checkpoint.reading import Checkpoint
from coterie.checkpoint.store import CheckpointStore
from coterie.checkpoint.weights import unit_shapes
from coterie.ids import RunId
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models import FolderWeights, build_stage, describe, load_whole_model, make_forward_spec, make_model_spec
from coterie.models.source import ModelSource, open_model
from coterie.models.trained import open_trained

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **ENDS}
TAGS = "AutoModelForTokenClassification"
ROWS = "AutoModelForSequenceClassification"
CAUSAL = "AutoModelForCausalLM"
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert tags": ("bert", TAGS, BASE),
    "bert rows": ("bert", ROWS, BASE),
    "llama, grouped queries": ("llama", CAUSAL, {**BASE, **ENDS, "num_key_value_heads": 2}),
    "gpt2, transposed": ("gpt2", CAUSAL, GPT2),
    "phi3, fused": ("phi3", CAUSAL, {**BASE, **ENDS}),
    "gpt-neox, fused": ("gpt_neox", CAUSAL, {**BASE, **ENDS}),
}
VARIANTS = ("lora", "rslora", "dora")
CUTS = ((0, 5), (0, 2, 5), (0, 1, 3, 5))
LABELS = {"id2label": {i: f"L{i}" for i in range(4)}, "label2id": {f"L{i}": i for i in range(4)}}
quiet_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:fan_in_fan_out")
every_family = pytest.mark.parametrize("family", FAMILIES)


class Model:
    """A tiny pretrained model without a task's layers, and a spec with adapters on every linear layer of its blocks."""

    def __init__(self, folder: Path, family: str, variant: str) -> None:
        kind, self.auto_class, values = FAMILIES[family]
        torch.manual_seed(3)
        save_class = transformers.AutoModelForCausalLM if self.auto_class == CAUSAL else transformers.AutoModel
        save_class.from_config(AutoConfig.for_model(kind, **values)).save_pretrained(folder)
        self.source: ModelSource = open_model(str(folder))
        self.spec: ModelSpec = make_model_spec(
            self.source,
            auto_class=self.auto_class,
            config_overrides={} if self.auto_class == CAUSAL else LABELS,
            seed=5,
            method="lora",
            lora=LoraSpec(variant=variant, rank=4, alpha=10, target_modules=("all-linear",)),  # type: ignore[arg-type]
        )
        self.weights = FolderWeights(self.source, self.spec)

    def plain(self, config: Any = None) -> torch.nn.Module:
        auto = getattr(transformers, self.auto_class)
        return auto.from_pretrained(
            self.source.folder, config=config or AutoConfig.for_model(**json.loads(self.spec.config_json))
        )

    def adapted_by_peft(self, values: dict[str, torch.Tensor]) -> torch.nn.Module:
        """PEFT's own adapters on the plain model; `values` are put where the names of PEFT's files mean them."""
        lora = self.spec.lora
        assert lora is not None
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            use_rslora=lora.variant == "rslora",
            use_dora=lora.variant == "dora",
            target_modules=list(lora.target_modules),
        )
        wrapped = get_peft_model(self.plain(), config)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if (key := in_files(name)) in values:
                    parameter.copy_(values[key])
        return wrapped.eval()

    def moved(self) -> dict[str, torch.Tensor]:
        """Everything that is trained, as after some training."""
        generator = torch.Generator().manual_seed(11)
        trained = [name for names in describe(self.spec).trainable for name in names]
        start = self.weights.get(trained)
        return {n: start[n] + 0.2 * torch.randn(start[n].shape, generator=generator) for n in trained}

    def checkpoint(self, folder: Path, values: dict[str, torch.Tensor]) -> Checkpoint:
        terms = RunTerms(run_id=RunId("r"), model=self.spec, optimizer=OptimizerSpec(), seed=5, batch_rows=8,
                         micro_batches=2, schedule="flush")  # fmt: skip
        shapes = unit_shapes(self.spec)
        with CheckpointStore(folder).begin(7, shapes) as writer:
            for unit, named in shapes.items():
                writer.write_unit(unit, {name: values[name] for name in named}, {})
            return writer.commit(
                Manifest(terms=terms, global_step=7, epoch=0, data_position=7, samples_seen=56, loss_tail=(1.0,))
            )


def in_files(name: str) -> str:
    """A parameter of a PEFT model as PEFT's files name it."""
    name = name.removeprefix("base_model.model.")
    if ".lora_magnitude_vector." in name:
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".").replace(".base_layer.", ".")


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=mask).logits


@quiet_peft
@every_family
def test_adapters_start_as_pefts_do_whatever_the_cut(tmp_path: Path, family: str) -> None:
    model = Model(tmp_path, family, "dora")
    names = [name for name in describe(model.spec).unit_of if ".lora_" in name]
    start = model.weights.get(names)
    for cut in CUTS:
        for first, stop in itertools.pairwise(cut):
            for name, parameter in build_stage(model.spec, first, stop, model.weights).trainable().items():
                if name in start:
                    assert torch.equal(parameter, start[name]), name
    wrapped = model.adapted_by_peft({})
    pefts = {in_files(name): p for name, p in wrapped.named_parameters() if ".lora_" in name}
    assert pefts.keys() == start.keys()
    for name, value in start.items():
        assert value.shape == pefts[name].shape
        if ".lora_A." not in name:  # random here and there
            assert torch.equal(value, pefts[name]), name
    assert sum(name.endswith(".lora_magnitude_vector") for name in names) == len(names) // 3


@quiet_peft
@every_family
@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_peft_loads_the_folder_with_equal_logits_and_both_merges_equal_its_own(
    tmp_path: Path, family: str, variant: str
) -> None:
    model = Model(tmp_path / "base", family, variant)
    values = model.moved()
    checkpoint = model.checkpoint(tmp_path / "checkpoints", values)
    out = export_model(model.source, checkpoint, None, tmp_path / "out")
    expected = model.adapted_by_peft(values)

    loaded = PeftModel.from_pretrained(model.plain(AutoConfig.from_pretrained(out)), out)
    assert torch.equal(logits(loaded), logits(expected))
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["use_rslora"], settings["use_dora"]) == (variant == "rslora", variant == "dora")
    assert settings["task_type"] == {TAGS: "TOKEN_CLS", ROWS: "SEQ_CLS", CAUSAL: "CAUSAL_LM"}[model.auto_class]
    saved = {name.removeprefix("base_model.model.") for name in load_file(out / "adapter_model.safetensors")}
    assert saved == values.keys()

    # What runs on stages, put together whole.
    class Mapping:
        def get(self, names: Any) -> dict[str, torch.Tensor]:
            wanted = list(names)
            return {**model.weights.get([n for n in wanted if n not in values]), **{
                n: values[n].clone() for n in wanted if n in values}}  # fmt: skip

    assert torch.equal(logits(load_whole_model(model.spec, Mapping())), logits(expected))

    merged = export_model(model.source, checkpoint, None, tmp_path / "merged", ExportOptions(merge=True))
    by_peft = logits(expected.merge_and_unload())
    plain = getattr(transformers, model.auto_class).from_pretrained(merged)
    assert torch.equal(logits(plain), by_peft)

    trained = open_trained(out)
    spec = make_forward_spec(trained.source, auto_class=model.auto_class)
    read = load_whole_model(spec, trained.weights(spec))
    torch.testing.assert_close(logits(read), by_peft, rtol=1e-4, atol=1e-5)
