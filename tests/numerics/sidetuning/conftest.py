"""Tiny saved backbones of many families, one padded micro-batch with labels for each, and their taps."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from coterie.jobs.side_spec import SideSpec
from coterie.models import FolderWeights, build_stage, describe, open_model
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.backbone import make_backbone_spec
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.side_model import SideModel, build_side_model
from coterie.sidetuning.taps import TappedStage

TAGS, ROWS = "AutoModelForTokenClassification", "AutoModelForSequenceClassification"
TEXT = "AutoModelForCausalLM"
BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**BASE, **SPECIAL, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, **SPECIAL}
DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 61}
OPT = {"ffn_dim": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61, **SPECIAL}
CLS = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4, "classifier_pooling": "cls"}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert tags": (TAGS, "bert", BASE),
    "distilbert tags": (TAGS, "distilbert", DISTILBERT),
    "modernbert tags": (TAGS, "modernbert", {**BASE, **SPECIAL, **CLS}),
    "bert labels": (ROWS, "bert", BASE),
    "bert scores": (ROWS, "bert", {**BASE, "num_labels": 1}),
    "distilbert labels": (ROWS, "distilbert", DISTILBERT),
    "roberta labels": (ROWS, "roberta", {**BASE, "pad_token_id": 1}),
    "modernbert labels": (ROWS, "modernbert", {**BASE, **SPECIAL, **CLS}),
    "gpt2 labels": (ROWS, "gpt2", GPT2),
    "llama labels": (ROWS, "llama", GROUPED),
    "opt-350m shape scores": (
        ROWS,
        "opt",
        {**OPT, "num_labels": 1, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "gpt2 text": (TEXT, "gpt2", GPT2),
    "opt text": (TEXT, "opt", {**OPT, "word_embed_proj_dim": 32}),
    "llama text, tied": (TEXT, "llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2 text": (TEXT, "qwen2", GROUPED),
    "gpt_neox text": (TEXT, "gpt_neox", {**BASE, **SPECIAL}),
}
"""A name, its auto class, its model type and its tiny config: three blocks, five units."""


class SideCase:
    """A backbone, its plain model, and one micro-batch.

    Attributes:
        plain: The whole model as transformers loads it, in evaluation mode.
        labels: (B, T) or (B,); of some rows none is learnt.
    """

    def __init__(self, name: str, folder: Path) -> None:
        auto_class, kind, settings = FAMILIES[name]
        config = AutoConfig.for_model(kind, **{"num_labels": 3, **settings})
        torch.manual_seed(1)
        model_class = getattr(transformers, auto_class)
        model_class.from_config(config).save_pretrained(folder)
        source = open_model(folder)
        self.spec = make_backbone_spec(source, auto_class=auto_class, seed=7)
        self.weights = FolderWeights(source, self.spec)
        self.plain = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.plain.config.use_cache = False
        self.anatomy = describe(self.spec)
        self.inputs, self.labels = _micro_batch(config, auto_class)
        self._taps: dict[tuple[object, ...], ActivationBatch] = {}

    def taps(self, side: SideSpec, *, cuts: tuple[int, ...] = (0, 4)) -> ActivationBatch:
        """Activations, with labels, of the backbone cut at units `cuts`; computed once."""
        known = (side.first_layer, side.selects_tokens, cuts)
        if known not in self._taps:
            self._taps[known] = self._tap(side, cuts)
        return self._taps[known]

    def _tap(self, side: SideSpec, cuts: tuple[int, ...]) -> ActivationBatch:
        selection = TokenSelector(self.spec, side).select(self.inputs, self.labels)
        taps: dict[int, Tensor] = {}
        hidden = None
        for start, stop in itertools.pairwise(cuts):
            stage = TappedStage(build_stage(self.spec, start, stop, self.weights), side.first_layer)
            hidden, own = stage.forward(self.inputs, hidden, selection)
            assert tuple(own) == stage.layers
            taps |= own
        return ActivationBatch(
            samples=torch.arange(len(self.labels)),
            counts=selection.counts,
            layers=tuple(taps),
            taps=torch.stack(list(taps.values()), dim=1),
            labels=selection.loss_labels(self.labels),
            loss_index=selection.loss_index,
        )

    def side_model(self, side: SideSpec, *, opened: bool = False) -> SideModel:
        """A new side model; `opened`: with random gates and weights, as after some training."""
        model = build_side_model(self.spec, side, self.weights)
        if opened:
            draw = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for parameter in model.network.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
        return model


def _micro_batch(config: Any, auto_class: str) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(5)
    lengths = (9, 6, 4, 7)
    mask = torch.tensor([[int(token < length) for token in range(9)] for length in lengths])
    ids = torch.randint(3, 61, mask.shape, generator=draw).masked_fill(mask == 0, config.pad_token_id or 0)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if auto_class == ROWS:
        if config.num_labels == 1:
            return inputs, torch.tensor([0.5, -1.0, torch.nan, 2.0])
        return inputs, torch.tensor([0, 2, -100, 1])
    labels = torch.randint(0, 61 if auto_class == TEXT else 3, mask.shape, generator=draw)
    learnt = torch.rand(mask.shape, generator=draw) < 0.5
    learnt[2] = False
    return inputs, labels.masked_fill(~learnt | (mask == 0), -100)


@pytest.fixture(scope="session")
def side_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SideCase]:
    """A case by the name of its family, made once."""
    made: dict[str, SideCase] = {}

    def get(name: str) -> SideCase:
        if name not in made:
            made[name] = SideCase(name, tmp_path_factory.mktemp("backbone"))
        return made[name]

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with `case` runs for every family."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", FAMILIES, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest, side_case: Callable[[str], SideCase]) -> SideCase:
    return side_case(request.param)
