"""An exported side network gives the trainer's logits: by its README's own lines in plain transformers, and by coterie.

Every network is made up, with open gates. What is compared was computed on the server's side, from taps of a cut
backbone; the exported folder runs the whole model from its files.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

import coterie
from coterie.checkpoint.export_record import ExportRecord
from coterie.errors import ModelError, UsageError
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_folder import SIDE_CONFIG, TASK_LAYERS
from coterie.jobs.side_spec import SideSpec
from coterie.models import FolderWeights, PackedWeights, build_stage, load_whole_model, make_model_spec, open_model
from coterie.models.spec import make_forward_spec
from coterie.models.trained import open_trained
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.additive import added
from coterie.sidetuning.export import SideExportOptions, export_side, trained_side
from coterie.sidetuning.inference import SideBackbone
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.side_model import SideModel, build_side_model
from coterie.sidetuning.taps import TappedStage

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61}
DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 61}
PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TAGS, CLASSES, TEXT = "AutoModelForTokenClassification", "AutoModelForSequenceClassification", "AutoModelForCausalLM"
LABELS: dict[str, Any] = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}

CASES: dict[str, tuple[str, dict[str, Any], str, SideSpec]] = {
    "bert tags": ("bert", BASE, TAGS, SideSpec(rank=4)),
    "bert tags from layer 2 on": ("bert", BASE, TAGS, SideSpec(rank=4, first_layer=2, temperature=0.5)),
    "bert labels, additive": ("bert", BASE, CLASSES, SideSpec(rank=4, mode="additive")),
    "distilbert labels": ("distilbert", DISTILBERT, CLASSES, SideSpec(rank=4)),
    "roberta labels": ("roberta", {**BASE, "pad_token_id": 1}, CLASSES, SideSpec(rank=4)),
    "llama labels": ("llama", {**BASE, **PAD}, CLASSES, SideSpec(rank=4)),
    "gpt2 text": ("gpt2", {**GPT2, **PAD}, TEXT, SideSpec(rank=4)),
    "llama text, tied": ("llama", {**BASE, **PAD, "tie_word_embeddings": True}, TEXT, SideSpec(rank=4, first_layer=3)),
}


def save_tokenizer(folder: Path, pad: str) -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(61)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, unk_token="w2", model_max_length=32)
    fast.save_pretrained(folder)
    return fast


class Case:
    """A tiny backbone on disk, and a side model beside it that was never trained but answers something of its own."""

    def __init__(self, folder: Path, kind: str, auto_class: str, settings: dict[str, Any], side: SideSpec) -> None:
        torch.manual_seed(3)
        base = AutoModelForCausalLM if auto_class == TEXT else AutoModel
        self.base = folder / "base"
        base.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(self.base)
        self.pad = settings.get("pad_token_id", 0)
        self.tokenizer = save_tokenizer(self.base, f"w{self.pad}")
        self.source = open_model(self.base)
        self.spec = self._spec(auto_class)
        self.weights = FolderWeights(self.source, self.spec)
        self.model = build_side_model(self.spec, side, PackedWeights(self.weights, self.spec))
        with torch.no_grad():
            for parameter in self.model.parameters().values():
                parameter.add_(torch.randn_like(parameter) * 0.2)

    def _spec(self, auto_class: str) -> ModelSpec:
        if auto_class == TEXT:
            return make_forward_spec(self.source, auto_class=auto_class)
        return make_model_spec(self.source, auto_class=auto_class, config_overrides=LABELS, seed=5, method="head")

    def export(self, folder: Path, **options: Any) -> Path:
        trained = trained_side(self.model.side, self.model.parameters(), self.weights)
        task = {TAGS: "token-classification", CLASSES: "sequence-classification", TEXT: "causal-lm"}
        record = ExportRecord(coterie="0", run_id="r", step=3, files=(), task=task[self.spec.auto_class])
        return export_side(
            self.source,
            self.spec,
            trained,
            self.tokenizer,
            folder,
            record=record,
            options=SideExportOptions(**options),
        )

    def inputs(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(4, 61, (3, 9), generator=generator)
        mask = torch.ones_like(ids)
        ids[1, 5:] = self.pad
        mask[1, 5:] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def expected(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
        """What the server's side computes of the tokens that matter, and which those are."""
        last = len(self.model.network.layers) + self.model.side.first_layer
        backbone = TappedStage(build_stage(self.spec, 0, last, PackedWeights(self.weights, self.spec)))
        selection = TokenSelector(self.spec, self.model.side).select(inputs, None)
        _, taps = backbone.forward(inputs, None, selection)
        layers = self.model.network.layers
        batch = ActivationBatch(
            samples=torch.arange(3),
            counts=selection.counts,
            layers=layers,
            taps=torch.stack([taps[layer] for layer in layers], dim=1),
        )
        return answer_of(self.model, batch), selection


def answer_of(model: SideModel, batch: ActivationBatch) -> Tensor:
    with torch.no_grad():
        if model.side.mode == "additive":
            return added(model.backbone_logits(batch), model.additions(batch))
        return model.logits(batch)


def chosen(logits: Tensor, selection: Any) -> Tensor:
    """The logits (N, C) of the tokens or rows that were selected."""
    return logits if logits.ndim == 2 else logits[selection.rows, selection.positions]


def by_readme(folder: Path) -> dict[str, Any]:
    """Run the lines of a folder's README; what they define."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "coterie" not in code
    scope: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(folder)), scope)  # noqa: S102 - what users are told to run
    return scope


@pytest.fixture(params=CASES)
def made_up(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    kind, settings, auto_class, side = CASES[request.param]
    return Case(tmp_path, kind, auto_class, settings, side)


def test_the_lines_of_the_readme_give_the_logits_of_the_trainer(made_up: Case, tmp_path: Path) -> None:
    case = made_up
    folder = case.export(tmp_path / "model")
    inputs = case.inputs()
    expected, selection = case.expected(inputs)
    scope = by_readme(folder)
    with torch.no_grad():
        answer = scope["answer"](**inputs) if "answer" in scope else scope["model"](**inputs).logits
    torch.testing.assert_close(chosen(answer, selection), expected, rtol=1e-5, atol=1e-5)


def test_local_inference_gives_the_logits_of_the_trainer(made_up: Case, tmp_path: Path) -> None:
    case = made_up
    folder = case.export(tmp_path / "model")
    inputs = case.inputs()
    expected, selection = case.expected(inputs)
    trained = open_trained(folder)
    spec = make_forward_spec(trained.source, auto_class=case.spec.auto_class)
    weights = trained.weights(spec)
    logits = SideBackbone(load_whole_model(spec, weights), spec, weights, folder).logits(inputs)
    if case.model.side.mode == "additive":
        logits, expected = logits.softmax(-1), expected.clamp_min(1e-6).log().softmax(-1)
    torch.testing.assert_close(chosen(logits, selection), expected, rtol=1e-5, atol=1e-5)


def test_text_written_with_a_cache_is_the_argmax_without_one(tmp_path: Path) -> None:
    kind, settings, auto_class, side = CASES["llama text, tied"]
    case = Case(tmp_path, kind, auto_class, settings, side)
    folder = case.export(tmp_path / "model")
    texts = ["w9 w8 w7 w30", "w5", "w11 w12"]
    written = coterie.generate(folder, texts, max_new_tokens=6)
    scope = by_readme(folder)
    for text, found in zip(texts, written, strict=True):
        ids = scope["tokenizer"](text, return_tensors="pt")["input_ids"]
        start = ids.shape[1]
        with torch.no_grad():
            for _ in range(6):
                newest = scope["model"](input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
                ids = torch.cat([ids, newest[:, None]], dim=1)
        assert found == scope["tokenizer"].decode(ids[0, start:], skip_special_tokens=True)
    plain = coterie.generate(case.base, texts, max_new_tokens=6, task="causal-lm")
    assert plain != written, "the side network has a say"


def test_an_evaluation_has_the_loss_and_the_accuracy_of_the_trainer(tmp_path: Path) -> None:
    kind, settings, auto_class, side = CASES["roberta labels"]
    case = Case(tmp_path, kind, auto_class, settings, side)
    folder = case.export(tmp_path / "model")
    texts, labels = ["w9 w8 w7", "w30 w31", "w40"], [0, 2, 1]
    rows = [{"text": text, "label": "abc"[label]} for text, label in zip(texts, labels, strict=True)]
    found = coterie.evaluate(folder, rows).record
    encoded = case.tokenizer(texts, padding=True, return_tensors="pt")
    logits, _ = case.expected({name: encoded[name] for name in ("input_ids", "attention_mask")})
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    right = (logits.argmax(-1) == torch.tensor(labels)).float().mean()
    assert found.metrics["accuracy"] == pytest.approx(float(right))


def test_a_copied_backbone_needs_no_other_folder(tmp_path: Path) -> None:
    kind, settings, auto_class, side = CASES["bert tags"]
    case = Case(tmp_path, kind, auto_class, settings, side)
    inputs = case.inputs()
    expected, selection = case.expected(inputs)
    folder = case.export(tmp_path / "model", copy_backbone=True)
    case.base.rename(tmp_path / "elsewhere")
    moved = folder.rename(tmp_path / "moved")
    with torch.no_grad():
        answer = by_readme(moved)["model"](**inputs).logits
    torch.testing.assert_close(chosen(answer, selection), expected, rtol=1e-5, atol=1e-5)
    assert len(coterie.predict(moved, ["w9 w8 w7"])[0].words) == 3  # type: ignore[attr-defined] # a tagged sentence


def test_a_backbone_that_is_gone_or_changed_is_named(tmp_path: Path) -> None:
    kind, settings, auto_class, side = CASES["bert tags"]
    case = Case(tmp_path, kind, auto_class, settings, side)
    folder = case.export(tmp_path / "model")
    weights = case.base / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(ModelError, match="other weights"):
        open_trained(folder)
    weights.unlink()
    case.base.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="backbone of the side network"):
        open_trained(folder)


def test_task_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    kind, settings, auto_class, side = CASES["bert tags"]
    case = Case(tmp_path, kind, auto_class, settings, side)
    folder = case.export(tmp_path / "model")
    save_file({"score.weight": torch.zeros(3, 32)}, folder / TASK_LAYERS)
    trained = open_trained(folder)
    with pytest.raises(ModelError):
        trained.weights(make_forward_spec(trained.source, auto_class=auto_class))


def test_a_network_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    kind, settings, auto_class, side = CASES["bert tags"]
    case = Case(tmp_path, kind, auto_class, settings, side)
    folder = case.export(tmp_path / "model")
    path = folder / SIDE_CONFIG
    config = json.loads(path.read_text())
    config["side"]["rank"] = 8
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"down\.1\.weight"):
        coterie.predict(folder, ["w9 w8"])


def test_several_devices_are_refused_with_the_reason(tmp_path: Path) -> None:
    kind, settings, auto_class, side = CASES["bert tags"]
    case = Case(tmp_path, kind, auto_class, settings, side)
    folder = case.export(tmp_path / "model")
    with pytest.raises(UsageError, match="one device"):
        coterie.predict(folder, ["w9 w8"], workers=2)
