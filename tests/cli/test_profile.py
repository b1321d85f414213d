"""`coterie profile`: backends, timings, allocation; as text, as JSON, as a picture."""

import json

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig, MambaConfig

from coterie.errors import BackendError
from coterie.measure.layer_shapes import layer_shapes
from coterie.measure.share_work import ShareWork

SHORT = ("--rows", "1", "--tokens", "4", "--backends", "torch,numpy")


def test_json_holds_timings_of_every_count_and_an_allocation_that_adds_up(answer, base_model):
    code, found = answer("profile", base_model, *SHORT)
    assert code == 0
    assert [backend["name"] for backend in found["backends"]] == ["torch", "numpy"]
    assert all(error < 1e-4 for error in found["errors"].values())
    profile = found["profile"]
    assert (profile["groups"], profile["neurons"], profile["rows"], profile["tokens"]) == (2, 24, 1, 4)
    # On a busy machine either may look hopelessly slow; the fastest is always measured with every count.
    heads = [[timing["count"] for timing in backend["attention"]] for backend in profile["backends"]]
    assert [1, 2] in heads
    assert 24 in [backend["neurons"][-1]["count"] for backend in profile["backends"]]
    assert all(t["seconds"] > 0 for backend in profile["backends"] for t in backend["attention"] + backend["neurons"])
    for part, total in (("attention", 2), ("neurons", 24)):
        allocation = found["allocation"][part]
        assert sum(share["count"] for share in allocation["shares"]) == total
        assert allocation["predicted_s"] <= allocation["best_single_s"]
        assert len(allocation["shares"]) + len(allocation["left_out"]) == 2


def test_the_second_time_the_kept_figures_are_shown_and_again_measures(answer, base_model):
    words = ("profile", base_model, "--rows", "1", "--tokens", "3", "--backends", "torch")
    first, second, third = (answer(*words, *more)[1]["profile"] for more in ((), (), ("--again",)))
    assert first == second
    assert third["backends"] != first["backends"]


def test_adapters_are_another_measurement_than_full_training(answer, base_model):
    words = ("profile", base_model, "--rows", "1", "--tokens", "3", "--backends", "torch")
    _, full = answer(*words)
    _, lora = answer(*words, "--method", "lora")
    assert full["profile"]["key"] != lora["profile"]["key"]


def test_text_shows_tables_and_the_allocation(told, base_model):
    code, out, _ = told("profile", base_model, *SHORT)
    assert code == 0
    lines = out.splitlines()
    heads = lines.index("2 attention heads, ms fused / head by head")
    assert lines[heads + 1].split() == ["KV", "groups", "torch", "numpy"]
    assert [line.split()[0] for line in lines[heads + 2 : heads + 4]] == ["1", "2"]
    assert "micro-batches of 1 row of 4 tokens, full" in lines[0]
    allocation = lines[lines.index("allocation, of a micro-batch and block") + 1 :]
    assert allocation[0].split()[0] == "heads"
    assert "alone" in allocation[0]
    assert any(line.split()[0] == "layer" for line in allocation)


def test_the_plot_is_a_picture(told, base_model, tmp_path):
    path = tmp_path / "profile.png"
    code, out, _ = told("profile", base_model, *SHORT, "--plot", path)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert out.rstrip().endswith(f"plot: {path}")


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (("--rows", "0"), 2, "--rows is 0"),
        (("--tokens", "-1"), 2, "--tokens is -1"),
        (("--threads", "0"), 2, "--threads is 0"),
        (("--backends", ","), 2, "--backends names none"),
        (("--backends", "abacus"), 19, "abacus"),
        (("--backends", "torch+abacus"), 19, "no backend abacus"),
        (("--backends", "auto,torch"), 2, "auto means all of them"),
    ],
)
def test_wrong_wishes_are_named(answer, base_model, words, exit_code, message):
    code, found = answer("profile", base_model, *words)
    assert code == exit_code
    assert message in found["error"]["message"]


def test_a_plot_that_cannot_be_written_is_an_error(answer, base_model, tmp_path):
    code, found = answer("profile", base_model, *SHORT, "--plot", tmp_path / "absent" / "x.png")
    assert found["error"]["slug"] == "storage"
    assert code == found["error"]["exit_code"]


def test_a_model_that_cannot_be_split_says_so(answer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MambaConfig(num_hidden_layers=1).to_dict()))
    code, found = answer("profile", tmp_path)
    assert code != 0
    assert "mamba is not among the families" in found["error"]["message"]


def test_shapes_are_read_off_the_config():
    bert = layer_shapes(BertConfig())
    assert bert.attention is not None
    assert bert.neurons is not None
    assert (bert.attention.groups, bert.attention.head_dim, bert.attention.biased) == (12, 64, True)
    assert (bert.neurons.neurons, bert.neurons.gated, bert.neurons.activation) == (3072, False, "gelu")
    assert (bert.causal, bert.dropout, bert.blocks) == (False, True, 12)
    llama = layer_shapes(LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64))
    assert llama.attention is not None
    assert llama.neurons is not None
    assert (llama.attention.heads, llama.attention.groups, llama.attention.rotary_dims) == (9, 3, 64)
    assert (llama.attention.biased, llama.neurons.gated, llama.neurons.biased) == (False, True, False)
    assert (llama.causal, llama.dropout) == (True, False)
    gpt2 = layer_shapes(GPT2Config())
    assert gpt2.neurons is not None
    assert (gpt2.neurons.neurons, gpt2.neurons.activation) == (3072, "gelu_tanh")


def test_what_no_backend_can_compute_is_an_error_and_not_an_empty_table(told, base_model, monkeypatch):
    def gone(_work, _backend):
        raise BackendError("the device is gone")

    monkeypatch.setattr(ShareWork, "once", gone)
    code, out, err = told("profile", base_model, "--rows", "1", "--tokens", "5", "--backends", "numpy")
    assert (code, out) == (19, "")
    assert "no backend could compute a layer" in err
    assert "1 x 5 tokens: numpy attention: it failed: the device is gone" in err
