from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coterie.errors import RecipeError, UnsupportedModelError
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.models import config_of, describe, make_model_spec, open_model

TAGS = "AutoModelForTokenClassification"

SaveModel = Callable[..., Path]


def spec_of(folder: Path, auto_class: str = TAGS, **wishes: object) -> ModelSpec:
    settings = {"config_overrides": {}, "seed": 1, **wishes}
    return make_model_spec(open_model(folder), auto_class=auto_class, **settings)  # type: ignore[arg-type]


def test_a_spec_survives_the_wire(bert_base: Path) -> None:
    spec = spec_of(bert_base, method="lora", lora=LoraSpec(rank=4))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


def test_settings_of_the_task_are_in_the_config(bert_base: Path) -> None:
    labels = {0: "O", 1: "B-PER", 2: "I-PER"}
    overrides = {"id2label": labels, "label2id": {v: k for k, v in labels.items()}, "hidden_dropout_prob": 0.3}
    config = config_of(spec_of(bert_base, config_overrides=overrides))
    assert config.num_labels == 3
    assert config.id2label == labels
    assert config.hidden_dropout_prob == 0.3


def test_a_setting_that_the_config_does_not_have_is_named(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="no setting hidden_dropuot") as caught:
        spec_of(bert_base, config_overrides={"hidden_dropuot": 0.1})
    assert "hidden_dropout_prob" in caught.value.hint


def test_a_setting_of_the_wrong_type_is_a_recipe_error(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="hidden_dropout_prob"):
        spec_of(bert_base, config_overrides={"hidden_dropout_prob": "a lot"})


def test_full_fine_tuning_trains_everything(bert_base: Path) -> None:
    spec = spec_of(bert_base)
    assert describe(spec).trainable_names == describe(spec).unit_of.keys()


@pytest.mark.parametrize(
    ("pattern", "unit"), [("embedding", 0), ("block 1", 2), ("bert.embeddings.*", 0), ("*.layer.1.*", 2)]
)
def test_units_and_globs_freeze_parameters(bert_base: Path, pattern: str, unit: int) -> None:
    spec = spec_of(bert_base, frozen_patterns=[pattern])
    anatomy = describe(spec)
    assert set(spec.frozen) == {name for name, owner in anatomy.unit_of.items() if owner == unit}
    assert anatomy.trainable[unit] == ()


def test_a_frozen_pattern_that_matches_nothing_is_refused(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="'embedings' matches no parameter") as caught:
        spec_of(bert_base, frozen_patterns=["embedings"])
    assert "embedding, block 0" in caught.value.hint


def test_freezing_everything_is_refused(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="nothing would be trained"):
        spec_of(bert_base, frozen_patterns=["*"])


def test_lora_targets_are_resolved_to_full_names_of_the_whole_model(bert_base: Path) -> None:
    lora = spec_of(bert_base, method="lora", lora=LoraSpec(rank=4, target_modules=("query", "output.dense"))).lora
    assert lora is not None
    assert "bert.encoder.layer.2.attention.self.query" in lora.target_modules
    assert len(lora.target_modules) == 3 * 3
    assert lora.modules_to_save == ("classifier",)


def test_auto_targets_are_pefts_choice_and_all_linear_is_every_linear_layer_of_the_blocks(bert_base: Path) -> None:
    auto = spec_of(bert_base, method="lora").lora
    every = spec_of(bert_base, method="lora", lora=LoraSpec(target_modules=("all-linear",))).lora
    assert auto is not None
    assert every is not None
    assert {name.rpartition(".")[2] for name in auto.target_modules} == {"query", "value"}
    assert len(every.target_modules) == 6 * 3


def test_a_new_layer_without_a_usual_name_is_trained_beside_the_adapters(bert_base: Path) -> None:
    lora = spec_of(bert_base, "AutoModelForMaskedLM", method="lora").lora
    assert lora is not None
    assert "cls.predictions.transform.dense" in lora.modules_to_save


def test_a_task_layer_that_the_folder_holds_is_trained_too(bert_tags: Path) -> None:
    lora = spec_of(bert_tags, method="lora").lora
    assert lora is not None
    assert lora.modules_to_save == ("classifier",)


def test_a_target_that_is_no_layer_is_named_with_those_that_are(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="no layer of the model is named q_proj") as caught:
        spec_of(bert_base, method="lora", lora=LoraSpec(target_modules=("query", "q_proj")))
    assert "dense, key, query, value" in caught.value.hint


def test_layers_that_peft_refuses_are_left_out_unless_named(save_model: object) -> None:
    folder = save_model("mamba", "AutoModelForCausalLM")  # type: ignore[operator]
    text = "AutoModelForCausalLM"
    every = spec_of(folder, text, method="lora", lora=LoraSpec(target_modules=("all-linear",))).lora
    assert every is not None
    assert {name.rpartition(".")[2] for name in every.target_modules} == {"in_proj", "x_proj", "dt_proj"}
    with pytest.raises(RecipeError, match="out_proj"):
        spec_of(folder, text, method="lora", lora=LoraSpec(target_modules=("out_proj",)))


def test_frozen_patterns_and_lora_exclude_each_other(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="LoRA freezes"):
        spec_of(bert_base, method="lora", frozen_patterns=["embedding"])
    with pytest.raises(RecipeError, match="method is full"):
        spec_of(bert_base, lora=LoraSpec())


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bert", {}, "read text in both directions"),
        ("bart", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}, "encoder-decoder"),
    ],
)
def test_what_is_no_causal_model_is_refused_as_one(
    save_model: SaveModel, kind: str, settings: dict[str, int], reason: str
) -> None:
    folder = save_model(kind, "AutoModel", **settings)
    with pytest.raises(UnsupportedModelError, match=reason):
        spec_of(folder, "AutoModelForCausalLM")


def test_a_bert_made_a_decoder_is_a_causal_model(save_model: SaveModel) -> None:
    folder = save_model("bert", "AutoModelForCausalLM", is_decoder=True)
    assert spec_of(folder, "AutoModelForCausalLM").method == "full"
