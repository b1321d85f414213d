"""A tiny BERT that tags words, its tokenizer, and a few sentences: all that a verb needs, in a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

from coterie.cli.main import main

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("anna", "lives", "in", "paris", "bob", "works", "for", "acme", "rome", "is", "old", ".", "##s", "the")
LABELS = ("O", "B-LOC", "I-LOC", "B-ORG", "B-PER")
SENTENCES = (
    (("Anna", "B-PER"), ("lives", "O"), ("in", "O"), ("Paris", "B-LOC"), (".", "O")),
    (("Bob", "B-PER"), ("works", "O"), ("for", "O"), ("Acme", "B-ORG")),
    (("Rome", "B-LOC"), ("is", "O"), ("old", "O"), (".", "O")),
    (("the", "O"), ("Acme", "B-ORG"), ("is", "O"), ("in", "O"), ("Rome", "B-LOC"), (".", "O")),
)


def save_tokenizer(folder: Path) -> None:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names).save_pretrained(folder)


def tiny_config(**settings: Any) -> BertConfig:
    return BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        **settings,
    )


def write_conll(path: Path, sentences: Any = SENTENCES) -> Path:
    path.write_text("\n".join("".join(f"{w}\t{t}\n" for w, t in sentence) for sentence in sentences), encoding="utf-8")
    return path


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Profiles of these tests, away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model without a classifier."""
    folder = tmp_path_factory.mktemp("base") / "tiny-bert"
    torch.manual_seed(3)
    BertModel(tiny_config()).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that tags: random, but with every label among its answers."""
    folder = tmp_path_factory.mktemp("tagger") / "tiny-tagger"
    torch.manual_seed(4)
    labels = dict(enumerate(LABELS))
    model = BertForTokenClassification(
        tiny_config(id2label=labels, label2id={name: index for index, name in labels.items()})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def save_labeller(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a random model that labels, or scores, whole texts: `save_labeller(id2label={0: "bad", 1: "good"})`."""

    def save(**settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("labeller") / "tiny-labeller"
        torch.manual_seed(4)
        model = BertForSequenceClassification(tiny_config(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder)
        save_tokenizer(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tagged sentences."""
    return write_conll(tmp_path_factory.mktemp("data") / "test.conll")


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command with `--json`; its exit code and what it printed."""

    def run(*words: object) -> tuple[int, Any]:
        code = main([*map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command; its exit code, what it printed, and what it said on the standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run
