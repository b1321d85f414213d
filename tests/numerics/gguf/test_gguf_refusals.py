"""Files that would be read wrongly are refused before anything starts; Llama 3.1's positions are read rightly."""

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coterie.errors import ModelError, UnsupportedModelError
from coterie.models import FolderWeights, make_model_spec, open_model

SHAPE = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
}


def write(path, architecture="llama", tensors=None, **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in SHAPE.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 500000.0)
    writer.add_uint32(f"{architecture}.vocab_size", 32)
    for key, value in metadata.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(factor):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 32, 2) / 32)
    return (plain / scaled).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_1s_positions_are_found_in_its_factors(tmp_path, factor):
    path = write(tmp_path / "a.gguf", tensors={"rope_freqs.weight": llama3_factors(factor)})
    rope = open_model(path).config.rope_parameters
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == pytest.approx(factor, rel=1e-6)
    assert rope["rope_theta"] == 500000.0


def test_other_factors_are_refused(tmp_path):
    path = write(tmp_path / "a.gguf", tensors={"rope_freqs.weight": np.linspace(1, 3, 16, dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"not Llama 3\.1's"):
        open_model(path)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"expert_count": 8}, "mixture of 8 experts"),
        ({"rope__scaling__type": "yarn"}, r"scales its positions \(yarn\)"),
    ],
)
def test_what_transformers_would_drop_is_refused(tmp_path, metadata, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        open_model(write(tmp_path / "a.gguf", **metadata))


def test_unknown_families_are_refused_naming_the_known_ones(tmp_path):
    with pytest.raises(UnsupportedModelError, match="'chatglm'") as refusal:
        open_model(write(tmp_path / "a.gguf", "chatglm"))
    assert "llama" in (refusal.value.hint or "")


def test_encoder_decoders_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        open_model(write(tmp_path / "a.gguf", "t5"))


def test_tensors_without_a_place_are_refused(tmp_path):
    source = open_model(write(tmp_path / "a.gguf", tensors={"blk.0.strange.weight": np.ones((2, 2), np.float32)}))
    spec = make_model_spec(source, auto_class="AutoModelForCausalLM", config_overrides={}, seed=0)
    with pytest.raises(ModelError, match=r"no place for, such as blk\.0\.strange\.weight"):
        FolderWeights(source, spec)


def test_a_file_that_lacks_a_block_is_refused(tmp_path):
    source = open_model(write(tmp_path / "a.gguf", tensors={"token_embd.weight": np.ones((32, 64), np.float32)}))
    spec = make_model_spec(source, auto_class="AutoModelForCausalLM", config_overrides={}, seed=0)
    with pytest.raises(ModelError, match=r"does not hold model\.layers\.0"):
        FolderWeights(source, spec).get(["model.layers.0.mlp.up_proj.weight"])
