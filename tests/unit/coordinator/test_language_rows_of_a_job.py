"""Rows of causal models in a job: how long they may be, and that packing is part of what a resume compares."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from coterie.config import load_recipe
from coterie.coordinator.job import encode_splits, rows_digest
from coterie.jobs.model_spec import ModelSpec
from coterie.models import Anatomy, describe
from coterie.tasks.causal_lm import CausalLm
from coterie.tasks.language_rows import TextDocument
from coterie.tasks.task import Split
from coterie.tasks.tokenizer import LoadedTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> LoadedTokenizer:
    vocabulary = {symbol: index for index, symbol in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<e>"])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return LoadedTokenizer(PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<e>"), "bytes")


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=4096,
    )
    return describe(ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForCausalLM"))


def encoded(tokenizer: LoadedTokenizer, anatomy: Anatomy, *, packing: bool = False, **options: object):
    recipe = load_recipe(None, {"model.name": "m", "data.train": "t", "task": "causal-lm", **options})
    rows = tuple(TextDocument(text=text) for text in ("a" * 1500, "b" * 300, "c" * 200))
    split = Split(name="train", source="made", examples=rows)
    return encode_splits(recipe, CausalLm(packing=packing), {"train": split}, tokenizer, anatomy)["train"]


def test_rows_have_at_most_1024_tokens_unless_the_recipe_says_more(tokenizer, anatomy) -> None:
    assert encoded(tokenizer, anatomy).lengths.tolist() == [1023, 478, 301, 201]
    assert encoded(tokenizer, anatomy, max_tokens=2000).lengths.tolist() == [1501, 301, 201]


def test_packing_changes_the_digest_that_a_resume_compares_and_the_lengths_that_are_planned(tokenizer, anatomy) -> None:
    apart, packed = encoded(tokenizer, anatomy), encoded(tokenizer, anatomy, packing=True)

    assert packed.lengths.tolist() == [1023, 980]
    assert packed.lengths.sum() == apart.lengths.sum()
    assert rows_digest(packed.rows) != rows_digest(apart.rows)
