"""The README of an exported folder."""

import msgspec
import pytest

from coterie import __version__
from coterie.checkpoint.model_card import CardFacts, model_card


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
