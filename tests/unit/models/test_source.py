import json
from pathlib import Path

import pytest

from coterie.errors import ModelError, UnsupportedModelError
from coterie.models import open_model


def write_config(folder: Path, **values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_folder_is_opened_without_reading_its_weights(bert_base: Path) -> None:
    source = open_model(bert_base)
    assert source.folder == bert_base
    assert source.config.model_type == "bert"


def test_a_folder_that_does_not_exist_is_named() -> None:
    with pytest.raises(ModelError, match="no model folder"):
        open_model("./nowhere/at-all")


def test_a_file_in_place_of_a_folder_is_refused(bert_base: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder .*config\.json"):
        open_model(bert_base / "config.json")


def test_a_hub_name_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="neither a folder here nor a model that can be downloaded") as caught:
        open_model("someone/a-model-nobody-has")
    assert "give a folder" in caught.value.hint


def test_a_misspelt_hub_name_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError):
        open_model("not a name!")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError):
        open_model(tmp_path)


def test_an_unknown_model_type_is_refused_and_the_supported_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="unknown model type 'hal9000'") as caught:
        open_model(write_config(tmp_path / "m", model_type="hal9000"))
    assert "Llama" in caught.value.hint


def test_a_model_that_brings_code_is_refused_and_the_code_is_not_run(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", model_type="mine", auto_map={"AutoConfig": "code.Config"})
    (folder / "code.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(UnsupportedModelError, match="code of its own"):
        open_model(folder)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", model_type="llama", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantized"):
        open_model(folder)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        open_model(write_config(tmp_path / "m", model_type="t5", is_encoder_decoder=True))
