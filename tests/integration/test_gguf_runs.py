"""A GGUF file through a whole run: trained over two workers with one device's losses, exported to GGUF, trained on."""

import shutil

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from coterie import api
from coterie.checkpoint.gguf_export import GgufOptions, export_gguf
from coterie.checkpoint.store import CheckpointStore
from coterie.coordinator.one_device import largest_difference
from coterie.errors import ModelError
from coterie.models import open_model
from coterie.tasks.tokenizer import load_tokenizer
from coterie.worker.settings import WorkerSettings

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A Llama of two blocks with byte-level tokens, as llama.cpp would hold it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(TOKENS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, intermediate_size=64, tie_word_embeddings=True)
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 2), (writer.add_context_length, 64), (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64), (writer.add_head_count, 2), (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_dimension_count, 16),
        (writer.add_rope_freq_base, 10000.0), (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"), (writer.add_token_list, list(TOKENS)),
        (writer.add_token_types, [3] * 3 + [1] * 257), (writer.add_token_merges, ["Ġ t"]),
        (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2),
    ):  # fmt: skip
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, parameter in model.named_parameters():
        kind = gguf.GGMLQuantizationType.Q8_0 if parameter.ndim > 1 else gguf.GGMLQuantizationType.F32
        tensor = gguf.quants.quantize(parameter.detach().numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "train.txt"
    path.write_text("".join(f"the {number} foxes saw {number * 7} dogs\n" for number in range(12)), encoding="utf-8")
    return path


def recipe_for(make_recipe, model, texts, output, **options):
    return make_recipe(
        output,
        **{"model.name": str(model), "data.train": str(texts), "data.task": "causal-lm", "workers": 2, **options},
    )


def test_a_run_from_a_gguf_file_has_one_devices_losses_and_can_be_written_as_one(
    model_file, texts, make_recipe, cluster, run, alone, tmp_path
):
    recipe = recipe_for(make_recipe, model_file, texts, tmp_path / "run", method="lora", lora_rank=2)
    result = run(recipe, cluster(WorkerSettings(name="a"), WorkerSettings(name="b")))
    assert largest_difference(result.losses, alone(recipe, len(result.losses))) < 1e-5
    checkpoint = CheckpointStore(tmp_path / "run" / "checkpoints").latest()
    tokenizer = load_tokenizer(model_file)
    written = export_gguf(
        open_model(checkpoint.manifest.base_model), checkpoint, tokenizer.hf, tmp_path / "out.gguf",
        GgufOptions(dtype="float32"),
    )  # fmt: skip
    again = recipe_for(make_recipe, written, texts, tmp_path / "again", max_steps=1)
    assert alone(again, 1)[0] < result.losses[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own
def test_an_adapter_says_which_gguf_file_it_misses_and_works_where_that_is_back(
    model_file, texts, make_recipe, cluster, run, tmp_path
):
    base = tmp_path / "base" / "tiny.gguf"
    base.parent.mkdir()
    shutil.copyfile(model_file, base)
    recipe = recipe_for(
        make_recipe, base, texts, tmp_path / "run", method="lora", lora_rank=2, workers=1, max_steps=2
    )  # fmt: skip
    folder = run(recipe, cluster(WorkerSettings(name="only"))).model_folder
    before = api.generate(folder, ["the"], max_new_tokens=3)
    moved = base.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"the base model of the adapter .* is not there: .*tiny\.gguf") as refused:
        api.generate(folder, ["the"], max_new_tokens=3)
    assert "put it back where it was" in (refused.value.hint or "")
    moved.rename(base)
    assert api.generate(folder, ["the"], max_new_tokens=3) == before
