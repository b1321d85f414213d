"""Units, ranges of blocks and globs; biases; task layers; what contradicts itself is refused."""

from pathlib import Path

import pytest

from coterie.errors import RecipeError
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.models import describe, make_model_spec, open_model
from coterie.models.trainable import matching

TAGS = "AutoModelForTokenClassification"


def spec_of(folder: Path, auto_class: str = TAGS, **wishes: object) -> ModelSpec:
    settings = {"config_overrides": {}, "seed": 1, **wishes}
    return make_model_spec(open_model(folder), auto_class=auto_class, **settings)  # type: ignore[arg-type]


def trained_units(spec: ModelSpec) -> list[int]:
    return [unit for unit, names in enumerate(describe(spec).trainable) if names]


@pytest.mark.parametrize(
    ("pattern", "units"),
    [
        ("embedding", {0}),
        ("embeddings", {0}),
        ("block 1", {2}),
        ("block 0..1", {1, 2}),
        ("blocks 1..2", {2, 3}),
        ("block 1..", {2, 3}),
        ("block 2..9", {3}),
        ("output layer", {4}),
        ("bert.encoder.layer.2.*", {3}),
        ("classifier.*", {4}),
    ],
)
def test_a_pattern_means_units_or_names(bert_base: Path, pattern: str, units: set[int]) -> None:
    anatomy = describe(spec_of(bert_base))
    assert matching(anatomy, [pattern], "trainable") == {n for n, unit in anatomy.unit_of.items() if unit in units}


@pytest.mark.parametrize("pattern", ["block 3", "block 2..1", "block -1", "blocks", "embeding", "layer.0"])
def test_a_pattern_that_means_nothing_is_refused(bert_base: Path, pattern: str) -> None:
    with pytest.raises(RecipeError, match="matches no parameter") as caught:
        spec_of(bert_base, trainable_patterns=[pattern])
    assert "embedding, block 0" in caught.value.hint
    assert "block 0..1" in caught.value.hint


def test_chosen_layers_are_the_complement_of_frozen_ones(bert_base: Path) -> None:
    chosen = spec_of(bert_base, trainable_patterns=["block 2", "output layer"])
    assert chosen == spec_of(bert_base, frozen_patterns=["embedding", "block 0..1"])
    assert trained_units(chosen) == [3, 4]
    assert describe(chosen).first_backward_unit == 3


def test_a_new_layer_cannot_stay_random(bert_base: Path, bert_tags: Path) -> None:
    with pytest.raises(RecipeError, match=r"classifier\.\w+ is new.*stay random") as caught:
        spec_of(bert_base, trainable_patterns=["block 2"])
    assert "add classifier.* to `trainable`" in caught.value.hint
    with pytest.raises(RecipeError, match="stay random") as caught:
        spec_of(bert_base, frozen_patterns=["output layer"])
    assert "leave classifier out of `freeze`" in caught.value.hint
    assert trained_units(spec_of(bert_tags, trainable_patterns=["block 2"])) == [3]


@pytest.mark.parametrize("method", ["full", "bitfit"])
def test_both_ends_of_one_choice_are_refused(bert_base: Path, method: str) -> None:
    with pytest.raises(RecipeError, match="both are given"):
        spec_of(bert_base, method=method, frozen_patterns=["embedding"], trainable_patterns=["block 0"])


def test_bitfit_trains_every_bias_and_the_task_layers(bert_base: Path) -> None:
    spec = spec_of(bert_base, method="bitfit")
    trained = describe(spec).trainable_names
    biases = {name for name in describe(spec).unit_of if name.endswith(".bias")}
    assert trained == biases | {"classifier.weight"}
    assert "bert.embeddings.LayerNorm.bias" in trained
    assert spec.method == "bitfit"


def test_bitfit_of_chosen_layers_trains_their_biases(bert_base: Path) -> None:
    some = describe(spec_of(bert_base, method="bitfit", trainable_patterns=["block 1"])).trainable_names
    assert {name.partition(".layer.1.")[1] for name in some} == {".layer.1.", ""}
    assert {"classifier.weight", "classifier.bias"} <= some
    rest = describe(spec_of(bert_base, method="bitfit", frozen_patterns=["embedding"]))
    assert rest.trainable[0] == ()
    assert rest.first_backward_unit == 1


def test_bitfit_without_biases_is_refused(tied_llama: Path) -> None:
    with pytest.raises(RecipeError, match="there are none to train"):
        spec_of(tied_llama, "AutoModelForCausalLM", method="bitfit")


def test_head_trains_the_task_layers_alone(bert_base: Path, bert_tags: Path) -> None:
    for folder in (bert_base, bert_tags):
        anatomy = describe(spec_of(folder, method="head"))
        assert anatomy.trainable_names == {"classifier.weight", "classifier.bias"}
        assert anatomy.first_backward_unit == anatomy.unit_count - 1


def test_head_without_a_task_layer_is_refused_with_another_way(tied_llama: Path) -> None:
    with pytest.raises(RecipeError, match="no task layer") as caught:
        spec_of(tied_llama, "AutoModelForCausalLM", method="head")
    assert 'trainable = ["output layer"]' in caught.value.hint


@pytest.mark.parametrize("pattern", ["output layer", "lm_head.*", "embeddings"])
def test_a_matrix_that_both_ends_use_is_part_of_both(tied_llama: Path, pattern: str) -> None:
    chosen = describe(spec_of(tied_llama, "AutoModelForCausalLM", trainable_patterns=[pattern])).trainable_names
    assert "model.embed_tokens.weight" in chosen
    frozen = describe(spec_of(tied_llama, "AutoModelForCausalLM", frozen_patterns=[pattern])).trainable_names
    assert "model.embed_tokens.weight" not in frozen
    assert ("model.norm.weight" in chosen) == (pattern == "output layer")


def test_no_adapter_goes_to_an_output_layer_that_is_the_embedding(tied_llama: Path) -> None:
    with pytest.raises(RecipeError, match="lm_head uses the embedding's matrix") as caught:
        spec_of(tied_llama, "AutoModelForCausalLM", method="lora", lora=LoraSpec(target_modules=("lm_head", "q_proj")))
    assert "leave lm_head out" in caught.value.hint


def test_head_leaves_nothing_to_choose(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="`head` trains the task layers"):
        spec_of(bert_base, method="head", trainable_patterns=["block 0"])


def test_adapters_go_where_the_patterns_say(bert_base: Path) -> None:
    spec = spec_of(bert_base, method="lora", trainable_patterns=["block 1.."])
    assert trained_units(spec) == [2, 3, 4]
    assert spec.lora is not None
    assert len(spec.lora.target_modules) == 4
    queries = spec_of(bert_base, method="lora", trainable_patterns=["*.query.*"]).lora
    assert queries is not None
    assert {name.rpartition(".")[2] for name in queries.target_modules} == {"query"}


def test_a_pattern_without_any_adapter_is_refused(bert_base: Path) -> None:
    with pytest.raises(RecipeError, match="'embedding' chooses no layer that gets an adapter"):
        spec_of(bert_base, method="lora", trainable_patterns=["block 1", "embedding"])
    lora = LoraSpec(target_modules=("bert.encoder.layer.0.attention.self.query",))
    with pytest.raises(RecipeError, match="'block 1' chooses no layer"):
        spec_of(bert_base, method="lora", lora=lora, trainable_patterns=["block 1"])


def test_a_specs_kinds_tell_blocks_apart_by_what_is_trained_in_and_below_them(bert_base: Path) -> None:
    kinds = describe(spec_of(bert_base, method="lora", trainable_patterns=["block 1.."])).unit_kinds
    assert len(set(kinds[1:4])) == 3  # below everything that is trained, the lowest of it, above
    assert len(set(describe(spec_of(bert_base, method="head")).unit_kinds[1:4])) == 1
    assert len(set(describe(spec_of(bert_base)).unit_kinds[1:4])) == 1
