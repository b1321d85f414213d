"""The README of a folder with a side network, and the same lines in the documentation."""

import re
from pathlib import Path

import pytest
from transformers import BertConfig

from coterie.checkpoint.export_record import ExportRecord
from coterie.jobs.model_spec import ModelSpec
from coterie.jobs.side_folder import SideConfig
from coterie.jobs.side_spec import SideSpec
from coterie.models import describe
from coterie.sidetuning.side_card import side_card, usage

PAGE = Path(__file__).parents[3] / "docs" / "how-to-predict-and-export.md"
RECORD = ExportRecord(coterie="0", run_id="r", step=12, files=(), task="token-classification")


def config_with(**settings: object) -> SideConfig:
    fields = {
        "backbone": "path/to/backbone",
        "auto_class": "AutoModelForTokenClassification",
        "blocks": "bert.encoder.layer",
        "layers": 6,
        "width": 384,
        "side": SideSpec(),
        **settings,
    }
    return SideConfig(**fields)  # type: ignore[arg-type] # each test names what it changes


def test_the_documentation_shows_the_lines_of_a_minilm_readme() -> None:
    bert = BertConfig(num_hidden_layers=6)
    spec = ModelSpec(config_json=bert.to_json_string(), auto_class="AutoModelForTokenClassification", method="none")
    anatomy = describe(spec)
    config = config_with(blocks=anatomy.blocks_name)
    lines = usage(config, stub_form=anatomy.stub_form, task_layers=True)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "\n".join(lines) + "\n" in blocks


def test_what_is_not_there_has_no_line() -> None:
    lines = "\n".join(usage(config_with(), stub_form="tensor", task_layers=False))
    assert "task_layers" not in lines
    assert "gguf" not in lines
    assert "answer" not in lines


def test_a_gguf_backbone_is_opened_as_a_file_of_its_folder() -> None:
    lines = "\n".join(usage(config_with(gguf_file="model.gguf"), stub_form="tuple", task_layers=False))
    assert 'from_pretrained("path/to/backbone", gguf_file="model.gguf"' in lines
    assert "*output[1:]" in lines


@pytest.mark.parametrize("mode", ["direct", "additive"])
def test_the_lines_are_python(mode: str) -> None:
    side = SideSpec(first_layer=3, mode=mode)  # type: ignore[arg-type] # both are modes
    lines = usage(config_with(side=side), stub_form="tensor", task_layers=True)
    compile("\n".join(lines), "README.md", "exec")


def test_the_readme_says_what_was_trained() -> None:
    card = side_card(
        config_with(), stub_form="tensor", task_layers=True, record=RECORD, metrics={"test entity F1": 0.7251}
    )
    assert "| side network | rank 64 on layers 1 to 6 of width 384 |" in card
    assert "| optimizer steps | 12 |" in card
    assert "| test entity F1 | 0.7251 |" in card
