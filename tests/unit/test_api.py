"""The Python front door: mistakes are told before anything slow or costly happens."""

import pytest

import coterie
from coterie import api
from coterie.errors import ModelError, RecipeError


def test_every_wrong_option_is_named_at_once(tmp_path):
    with pytest.raises(RecipeError) as caught:
        coterie.finetune("model", "data", epochs=0, methd="lora", learning_rate="fast", output=tmp_path / "run")
    assert "3 mistakes" in caught.value.message
    for word in ("epochs", "methd", "method", "a number"):
        assert word in caught.value.message
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_nowhere_leaves_no_folder_behind(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match="model"):
        api.finetune(tmp_path / "model", tmp_path / "data.conll", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_new_run_has_a_name_of_its_own():
    names = {api.training._new_run_id() for _ in range(50)}
    assert len(names) == 50
