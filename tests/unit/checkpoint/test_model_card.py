"""The README of an exported folder."""

import msgspec
import pytest

from coterie import __version__
from coterie.checkpoint.model_card import CardFacts, model_card
from coterie.jobs.model_spec import LoraSpec
from coterie.tasks.catalog import TASK_NAMES


@pytest.mark.parametrize(
    ("base_name", "title"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("/home/ada/packages/minilm/model/", "minilm"),
        ("model", "model"),
    ],
)
def test_the_title_is_what_people_call_the_base_model(tiny, base_name, title):
    card = model_card(tiny.manifest(9), CardFacts(), base_name=base_name, adapter=False)
    assert f"\n# {title}, fine-tuned\n" in card
    assert f"| base model | {base_name} |" in card


def test_every_library_is_named_once_with_the_version_that_trained(tiny):
    manifest = msgspec.structs.replace(tiny.manifest(9), libraries={"coterie": "0.0.9", "torch": "2.13.0"})
    card = model_card(manifest, CardFacts(), base_name="b", adapter=False)
    assert "| written by | coterie 0.0.9, torch 2.13.0 |" in card
    unknown = msgspec.structs.replace(manifest, libraries={})
    assert f"| written by | coterie {__version__} |" in model_card(unknown, CardFacts(), base_name="b", adapter=False)


def card_of(tiny, *, facts=CardFacts(), model=None, **terms):  # noqa: B008 - never changed
    manifest = tiny.manifest(9)
    spec = msgspec.structs.replace(manifest.terms.model, **(model or {}))
    manifest = msgspec.structs.replace(manifest, terms=msgspec.structs.replace(manifest.terms, model=spec, **terms))
    return model_card(manifest, facts, base_name="b", adapter=spec.lora is not None)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_every_task_is_named_and_has_the_hub_s_word_for_it(tiny, task):
    tags = {
        "token-classification": "token-classification",
        "sequence-classification": "text-classification",
        "regression": "text-classification",
        "causal-lm": "text-generation",
        "summarization": "summarization",
    }
    card = card_of(tiny, task=task)
    assert f"\n| task | {task} |\n" in card
    assert f"\npipeline_tag: {tags[task]}\n" in card


def test_a_checkpoint_without_a_task_goes_by_the_model_s_class(tiny):
    assert "pipeline_tag: text-generation" in card_of(tiny, model={"auto_class": "AutoModelForCausalLM"})
    assert "pipeline_tag" not in card_of(tiny)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({}, "full fine-tuning"),
        ({"frozen": ("a", "b")}, "full fine-tuning, 2 parameters frozen"),
        ({"method": "bitfit"}, "BitFit: biases and task layers"),
        ({"method": "head"}, "task layers only"),
        ({"method": "lora", "lora": LoraSpec(rank=4)}, "LoRA, rank 4, alpha 16"),
        ({"method": "lora", "lora": LoraSpec(variant="dora")}, "DoRA, rank 8, alpha 16"),
        (
            {"method": "lora", "lora": LoraSpec(variant="rslora"), "frozen_dtype": "int4"},
            "rsLoRA, rank 8, alpha 16, frozen weights held in int4",
        ),
    ],
)
def test_what_was_trained_is_said_for_every_method(tiny, model, text):
    assert f"\n| method | {text} |\n" in card_of(tiny, model=model)


def test_a_prompt_of_the_user_s_is_part_of_the_card(tiny):
    assert "| prompt | Sum: {text} |" in card_of(tiny, prompt="Sum: {text}")
    assert "| prompt |" not in card_of(tiny)


def test_quality_is_listed_by_split_and_metric(tiny):
    facts = CardFacts(metrics={"test spearman": 0.8123, "dev perplexity": 12.345})
    assert "| dev perplexity | 12.35 |\n| test spearman | 0.8123 |" in card_of(tiny, facts=facts)
