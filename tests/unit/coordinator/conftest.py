"""A job on a tiny model, prepared once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from coterie.config.loading import load_recipe
from coterie.coordinator.job import Job, prepare_job
from coterie.ids import RunId

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "anna", "paris", "is", "in", "far")


def _model(folder: Path) -> Path:
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    return folder


def _sentences(path: Path, lengths: tuple[int, ...]) -> Path:
    lines = []
    for length in lengths:
        lines += ["anna B-PER", *(["is O", "in O", "paris B-LOC", "far O"] * 15)[: length - 1], ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Eleven training rows of 2 to 20 words in batches of 4; dev rows of up to 60 words, longer than in training."""
    folder = tmp_path_factory.mktemp("job")
    train = _sentences(folder / "train.conll", (2, 20, 3, 8, 5, 5, 13, 2, 9, 4, 6))
    dev = _sentences(folder / "dev.conll", (60, 2, 2, 30, 2, 7, 19, 3, 1, 1, 40, *(2,) * 60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CACHE", str(folder / "cache"))
        recipe = load_recipe(
            None,
            {
                "model.name": str(_model(folder / "model")),
                "data.train": str(train),
                "data.dev": str(dev),
                "run.output": str(folder / "run"),
                "batch_rows": 4,
                "epochs": 2,
            },
        )
        yield prepare_job(recipe, RunId("run"), lambda _text: None)
