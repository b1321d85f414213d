from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from coterie.errors import UnsupportedModelError
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.models import describe, make_model_spec, open_model

TAGS = "AutoModelForTokenClassification"
TEXT = "AutoModelForCausalLM"
SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}


def spec_of(kind: str, auto_class: str, **settings: Any) -> ModelSpec:
    config = AutoConfig.for_model(kind, **{**SHAPE, **settings})
    return ModelSpec(config_json=config.to_json_string(), auto_class=auto_class)


def test_a_bert_has_its_embedding_blocks_and_output_layer() -> None:
    anatomy = describe(spec_of("bert", TAGS))
    assert anatomy.unit_names == ("embedding", "block 0", "block 1", "block 2", "output layer")
    assert anatomy.unit_kinds[0] == "embedding"
    assert anatomy.unit_kinds[1] == anatomy.unit_kinds[2] == anatomy.unit_kinds[3]
    assert anatomy.unit_of["bert.embeddings.LayerNorm.bias"] == 0
    assert anatomy.unit_of["bert.encoder.layer.2.output.dense.weight"] == 3
    assert anatomy.unit_of["classifier.weight"] == 4
    assert anatomy.tied is None


def test_blocks_of_another_shape_or_kind_of_attention_are_of_another_kind() -> None:
    kinds = describe(spec_of("gemma2", TEXT, head_dim=8, num_key_value_heads=2, pad_token_id=0)).unit_kinds
    assert kinds[1] == kinds[3] != kinds[2]


def test_a_frozen_block_is_of_another_kind_than_a_trained_one(bert_tags: Path) -> None:
    spec = make_model_spec(
        open_model(bert_tags), auto_class=TAGS, config_overrides={}, seed=0, frozen_patterns=["block 0"]
    )
    kinds = describe(spec).unit_kinds
    assert kinds[1] != kinds[2] == kinds[3]


def test_a_projection_before_the_blocks_belongs_to_the_embedding_and_one_after_them_to_the_output() -> None:
    anatomy = describe(spec_of("opt", TEXT, word_embed_proj_dim=16, do_layer_norm_before=False, ffn_dim=48))
    assert anatomy.unit_of["model.decoder.project_in.weight"] == 0
    assert anatomy.unit_of["model.decoder.project_out.weight"] == 4


def test_a_pooler_that_the_task_does_not_read_has_a_unit_too() -> None:
    config = AutoConfig.for_model("bert", **SHAPE)
    anatomy = describe(ModelSpec(config_json=config.to_json_string(), auto_class="AutoModelForSequenceClassification"))
    assert anatomy.unit_of["bert.pooler.dense.weight"] == 4


def test_tied_ends_are_one_parameter_of_the_embedding_used_by_the_output(tied_llama: Path) -> None:
    anatomy = describe(make_model_spec(open_model(tied_llama), auto_class=TEXT, config_overrides={}, seed=0))
    assert anatomy.tied is not None
    assert anatomy.tied.name == "model.embed_tokens.weight"
    assert anatomy.tied.output_slots == ("lm_head.weight",)
    assert anatomy.unit_of["model.embed_tokens.weight"] == 0
    assert "lm_head.weight" not in anatomy.unit_of
    assert "model.embed_tokens.weight" in anatomy.names_in(4, 5)
    assert "model.embed_tokens.weight" not in anatomy.names_in(1, 4)
    assert anatomy.names_in(0, 5).count("model.embed_tokens.weight") == 1


def test_a_masked_language_model_with_tied_matrix_and_bias_is_understood() -> None:
    anatomy = describe(spec_of("bert", "AutoModelForMaskedLM", tie_word_embeddings=True))
    assert anatomy.tied is not None
    assert anatomy.tied.name == "bert.embeddings.word_embeddings.weight"
    assert anatomy.unit_of["cls.predictions.bias"] == 4


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("bert", {"max_position_embeddings": 512}, 512),
        ("roberta", {"max_position_embeddings": 514}, 512),
        ("distilbert", {"max_position_embeddings": 512}, 512),
        ("opt", {"max_position_embeddings": 2048, "ffn_dim": 48, "word_embed_proj_dim": 32}, 2048),
        ("llama", {"max_position_embeddings": 4096}, 4096),
        ("gpt2", {"n_positions": 1024, "n_embd": 32, "n_head": 4}, 1024),
        ("bloom", {"n_head": 4}, None),
        ("mamba", {}, None),
    ],
)
def test_the_context_length_is_what_a_row_may_hold(kind: str, settings: dict[str, Any], expected: int | None) -> None:
    auto_class = TAGS if "bert" in kind else TEXT
    assert describe(spec_of(kind, auto_class, **settings)).context_length == expected


def test_adapters_have_the_unit_of_their_layer(bert_tags: Path) -> None:
    spec = make_model_spec(
        open_model(bert_tags), auto_class=TAGS, config_overrides={}, seed=0, method="lora", lora=LoraSpec(rank=2)
    )
    anatomy = describe(spec)
    name = "bert.encoder.layer.1.attention.self.query.lora_B.weight"
    assert anatomy.unit_of[name] == 2
    assert anatomy.shapes[name] == (32, 2)
    assert anatomy.trainable[0] == ()
    assert anatomy.trainable[4] == ("classifier.weight", "classifier.bias")
    assert all(".lora_" in name for unit in (1, 2, 3) for name in anatomy.trainable[unit])


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of("albert", TAGS, embedding_size=16), "shared layers"),
        (spec_of("deberta-v2", TAGS, relative_attention=True, pos_att_type=["p2c", "c2p"]), "cannot cross a cut"),
        (spec_of("roformer", TAGS, embedding_size=32), "as position embeddings"),
        (spec_of("opt", TEXT, ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.1), "layerdrop = 0.1"),
        (spec_of("zamba2", TEXT, layer_types=["mamba", "hybrid", "hybrid"]), "Zamba2"),
        (spec_of("t5", "AutoModelForSeq2SeqLM"), "encoder-decoder"),
        (spec_of("bert", "AutoModelForImageClassification"), "no AutoModelForImageClassification"),
        (spec_of("bert", "BertModelThatIsNot"), "no class BertModelThatIsNot"),
        (spec_of("vit", "AutoModelForImageClassification"), "tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_cut_is_refused_before_training_with_the_reason(spec: ModelSpec, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        describe(spec)
    assert caught.value.hint
