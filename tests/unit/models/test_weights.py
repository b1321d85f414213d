import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coterie.errors import ModelError
from coterie.models import FolderWeights, MappingWeights, build_stage, describe, make_model_spec, open_model
from coterie.models.source import ModelSource

TAGS = "AutoModelForTokenClassification"
TEXT = "AutoModelForCausalLM"


def folder_weights(folder: Path, auto_class: str, seed: int = 1, **overrides: object) -> FolderWeights:
    source = open_model(folder)
    return FolderWeights(source, make_model_spec(source, auto_class=auto_class, config_overrides=overrides, seed=seed))


def everything(weights: FolderWeights) -> dict[str, torch.Tensor]:
    return weights.get(weights._anatomy.unit_of)


@pytest.fixture
def copy_of(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def test_weights_equal_those_that_transformers_loads(tied_llama: Path) -> None:
    tensors = everything(folder_weights(tied_llama, TEXT))
    whole = dict(AutoModelForCausalLM.from_pretrained(tied_llama).named_parameters())
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)


def test_sharded_files_give_what_one_file_gives(tied_llama: Path, copy_of: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tied_llama).save_pretrained(copy_of, max_shard_size="20KB")
    assert len(list(copy_of.glob("*.safetensors"))) > 2
    one, many = everything(folder_weights(tied_llama, TEXT)), everything(folder_weights(copy_of, TEXT))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_stage_reads_no_shard_that_holds_only_other_stages(tied_llama: Path, copy_of: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tied_llama).save_pretrained(copy_of, max_shard_size="20KB")
    weights = folder_weights(copy_of, TEXT)
    index = json.loads((copy_of / "model.safetensors.index.json").read_text())["weight_map"]
    own = {file for name, file in index.items() if ".layers.1." in name}
    for file in set(index.values()) - own:
        (copy_of / file).write_bytes(b"unreadable")
    build_stage(weights._spec, 2, 3, weights)
    with pytest.raises(ModelError, match="cannot be read"):
        build_stage(weights._spec, 0, 1, weights)


def test_an_absent_shard_is_named(tied_llama: Path, copy_of: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tied_llama).save_pretrained(copy_of, max_shard_size="20KB")
    gone = min(copy_of.glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        folder_weights(copy_of, TEXT)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_bin_file_alone_works(tied_llama: Path, copy_of: Path, zipped: bool) -> None:
    tensors = _as_bin(tied_llama, copy_of)
    torch.save(tensors, copy_of / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    one, other = everything(folder_weights(tied_llama, TEXT)), everything(folder_weights(copy_of, TEXT))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sharded_bin_files_work(tied_llama: Path, copy_of: Path) -> None:
    tensors = _as_bin(tied_llama, copy_of)
    weight_map = {}
    for number, name in enumerate(tensors):
        file = f"pytorch_model-{number % 3}.bin"
        torch.save({k: v for i, (k, v) in enumerate(tensors.items()) if i % 3 == number % 3}, copy_of / file)
        weight_map[name] = file
    (copy_of / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one, other = everything(folder_weights(tied_llama, TEXT)), everything(folder_weights(copy_of, TEXT))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_bin_file_that_holds_code_is_refused_and_not_run(tied_llama: Path, copy_of: Path) -> None:
    _as_bin(tied_llama, copy_of)
    torch.save({"model.norm.weight": _Bomb()}, copy_of / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds more than weights"):
        folder_weights(copy_of, TEXT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_become_float32_in_memory(tied_llama: Path, copy_of: Path, dtype: torch.dtype) -> None:
    AutoModelForCausalLM.from_pretrained(tied_llama).to(dtype).save_pretrained(copy_of)
    full, half = everything(folder_weights(tied_llama, TEXT)), everything(folder_weights(copy_of, TEXT))
    assert all(tensor.dtype == torch.float32 for tensor in half.values())
    assert all(torch.equal(half[name], full[name].to(dtype).float()) for name in full)


def test_a_tied_matrix_is_found_under_either_name(tied_llama: Path, copy_of: Path) -> None:
    shutil.copytree(tied_llama, copy_of)
    tensors = load_file(copy_of / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, copy_of / "model.safetensors")
    found = folder_weights(copy_of, TEXT).get(["model.embed_tokens.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], tensors["lm_head.weight"])


def test_names_of_old_files_are_understood(bert_tags: Path, copy_of: Path) -> None:
    shutil.copytree(bert_tags, copy_of)
    tensors = load_file(copy_of / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
    save_file(old, copy_of / "model.safetensors")
    name = "bert.embeddings.LayerNorm.weight"
    assert torch.equal(folder_weights(copy_of, TAGS).get([name])[name], tensors[name])


def test_a_classifier_that_the_folder_lacks_is_new_and_depends_on_seed_and_name_alone(bert_base: Path) -> None:
    weights = folder_weights(bert_base, TAGS, num_labels=4)
    assert weights.new_layers == ("classifier.weight", "classifier.bias")
    alone = weights.get(["classifier.weight"])["classifier.weight"]
    torch.manual_seed(123)
    together = folder_weights(bert_base, TAGS, num_labels=4).get(["classifier.bias", "classifier.weight"])
    assert torch.equal(alone, together["classifier.weight"])
    assert not together["classifier.bias"].any()
    other = folder_weights(bert_base, TAGS, seed=2, num_labels=4).get(["classifier.weight"])["classifier.weight"]
    assert not torch.equal(alone, other)


def test_reading_does_not_disturb_the_random_state_of_the_process(bert_base: Path) -> None:
    before = torch.get_rng_state()
    everything(folder_weights(bert_base, TAGS))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_folder_that_lacks_a_block_is_refused(bert_tags: Path, copy_of: Path) -> None:
    shutil.copytree(bert_tags, copy_of)
    tensors = load_file(copy_of / "model.safetensors")
    lost = "bert.encoder.layer.1.output.dense.weight"
    del tensors[lost]
    save_file(tensors, copy_of / "model.safetensors")
    with pytest.raises(ModelError, match=lost):
        everything(folder_weights(copy_of, TAGS))


def test_another_number_of_labels_than_in_the_folder_is_refused(bert_tags: Path, bert_base: Path) -> None:
    wrong = folder_weights(bert_tags, TAGS, num_labels=3)
    for read in (wrong.check_classifier, lambda: everything(wrong)):
        with pytest.raises(ModelError, match=r"classifier\.(weight|bias) has shape \(5.*\(3") as caught:
            read()
        assert "trained for another number of labels" in caught.value.hint
    folder_weights(bert_tags, TAGS).check_classifier()
    folder_weights(bert_base, TAGS, num_labels=3).check_classifier()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_a_damaged_file_is_refused(bert_tags: Path, copy_of: Path, damage: bytes) -> None:
    shutil.copytree(bert_tags, copy_of)
    (copy_of / "model.safetensors").write_bytes(damage)
    with pytest.raises(ModelError):
        everything(folder_weights(copy_of, TAGS))


def test_a_folder_without_weights_is_refused(bert_tags: Path, copy_of: Path) -> None:
    shutil.copytree(bert_tags, copy_of)
    (copy_of / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        folder_weights(copy_of, TAGS)


def test_a_mapping_hands_over_its_tensors_and_names_what_it_lacks() -> None:
    tensor = torch.ones(2)
    weights = MappingWeights({"a": tensor, "b": torch.ones(2, dtype=torch.bfloat16)})
    assert weights.get(["a"])["a"] is tensor
    assert weights.get(["b"])["b"].dtype == torch.float32
    with pytest.raises(ModelError, match="2 of 3 tensors are missing, among them c, d"):
        weights.get(["a", "c", "d"])


def test_a_stage_from_a_mapping_equals_one_from_the_folder(tied_llama: Path) -> None:
    weights = folder_weights(tied_llama, TEXT)
    names = describe(weights._spec).names_in(2, 5)
    received = MappingWeights({name: tensor.clone() for name, tensor in weights.get(names).items()})
    one, other = build_stage(weights._spec, 2, 5, weights), build_stage(weights._spec, 2, 5, received)
    assert one.parameters().keys() == other.parameters().keys() == set(names)
    assert all(torch.equal(one.parameters()[name], other.parameters()[name]) for name in names)


def test_tensors_of_another_model_are_refused(tied_llama: Path) -> None:
    weights = folder_weights(tied_llama, TEXT)
    names = describe(weights._spec).names_in(1, 2)
    with pytest.raises(ModelError, match=r"has shape \(2,\)"):
        build_stage(weights._spec, 1, 2, MappingWeights(dict.fromkeys(names, torch.ones(2))))


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exit, ("the file's code was run",))


def _as_bin(folder: Path, copy: Path) -> dict[str, torch.Tensor]:
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    return tensors


def test_a_source_can_be_made_of_a_config_alone(tied_llama: Path, tmp_path: Path) -> None:
    shutil.copy(tied_llama / "config.json", tmp_path)
    source = open_model(tmp_path)
    assert isinstance(source, ModelSource)
    spec = make_model_spec(source, auto_class=TEXT, config_overrides={}, seed=0)
    assert build_stage(spec, 1, 3, None, device="meta").parameters()
