from pathlib import Path

import pytest

from coterie.checkpoint.export_record import ExportRecord, write_record
from coterie.config import forward_recipe
from coterie.config.forward import FORWARD_ROWS
from coterie.errors import RecipeError


def test_model_and_data_are_in_the_recipe_and_options_override_it() -> None:
    recipe = forward_recipe(Path("runs/x/model"), "test.conll", {"workers": 2, "label_column": 1})
    assert (recipe.model.name, recipe.data.train) == (str(Path("runs/x/model")), "test.conll")
    assert recipe.train.batch_rows == FORWARD_ROWS
    assert (recipe.cluster.workers, recipe.data.label_column) == (2, 1)
    assert forward_recipe("m", "d", {"batch_rows": 3}).train.batch_rows == 3


def test_rows_in_memory_need_no_path() -> None:
    assert forward_recipe("m", [{"tokens": ["a"]}], {}).data.train == "rows in memory"


def test_all_wrong_options_are_named() -> None:
    with pytest.raises(RecipeError) as caught:
        forward_recipe("m", "d", {"workrs": 2, "batch_rows": 0})
    assert "workrs" in caught.value.message
    assert "--batch-rows: is 0" in caught.value.message


def test_the_prompt_that_a_model_learnt_with_goes_with_its_task_only(tmp_path) -> None:
    record = ExportRecord(coterie="0", run_id="r", step=1, files=(), task="causal-lm", prompt="{input}: {text}")
    write_record(tmp_path, record)

    assert forward_recipe(tmp_path, "d", {}).data.prompt == "{input}: {text}"
    assert forward_recipe(tmp_path, "d", {"task": "causal-lm"}).data.prompt == "{input}: {text}"
    assert forward_recipe(tmp_path, "d", {"task": "sequence-classification"}).data.prompt is None


def test_rows_are_as_long_as_those_that_a_model_learnt_unless_others_are_asked_for(tmp_path) -> None:
    write_record(tmp_path, ExportRecord(coterie="0", run_id="r", step=1, files=(), task="causal-lm", max_tokens=64))

    assert forward_recipe(tmp_path, "d", {}).data.max_tokens == 64
    assert forward_recipe(tmp_path, "d", {"max_tokens": 32}).data.max_tokens == 32
    assert forward_recipe(tmp_path, "d", {"task": "regression"}).data.max_tokens is None
