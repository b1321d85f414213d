"""Bad input is refused before anything starts: a sentence with what and where, a hint, an exit code of its own."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel, PreTrainedTokenizerFast, T5Config, T5Model

from coterie.cli.main import main

WORDS = ("[PAD]", "[UNK]", "Ada", "met", "Grace", "in", "Rome")
GOOD = "Ada\tB-PER\nmet\tO\nGrace\tB-PER\n\nRome\tB-LOC\n"
SHAPE = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": len(WORDS)}


def save(model, folder):
    model.save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    config = BertConfig(**SHAPE, num_hidden_layers=2, max_position_embeddings=16)
    return save(BertModel(config), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.conll"
    path.write_text(GOOD)
    return path


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))

    def run(*words, code):
        assert main(["train", "--output", str(tmp_path / "run"), *map(str, words)]) == code
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("try: "), error
        assert not (tmp_path / "run" / "checkpoints").exists()
        return error

    return run


def test_a_model_folder_that_does_not_exist(refused, data, tmp_path):
    assert "there is no model folder" in refused("--model", tmp_path / "nowhere", "--train", data, code=5)


def test_a_data_file_that_does_not_exist(refused, bert, tmp_path):
    assert "absent.conll" in refused("--model", bert, "--train", tmp_path / "absent.conll", code=4)


def test_a_line_with_too_few_columns_is_named(refused, bert, tmp_path):
    path = tmp_path / "broken.conll"
    path.write_text("Ada\tB-PER\nmet\n")
    assert f"{path}:2" in refused("--model", bert, "--train", path, code=4)


def test_an_encoder_decoder_is_refused_by_name(refused, data, tmp_path):
    config = T5Config(d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8, vocab_size=len(WORDS))
    folder = save(T5Model(config), tmp_path / "t5")
    assert "encoder-decoder" in refused("--model", folder, "--train", data, code=6)


def test_a_model_with_shared_layers_is_refused_by_name(refused, data, tmp_path):
    config = AlbertConfig(**SHAPE, embedding_size=8, num_hidden_layers=2)
    folder = save(AlbertModel(config), tmp_path / "albert")
    assert "albert" in refused("--model", folder, "--train", data, code=6).lower()


def test_rows_longer_than_the_model_s_context_cannot_be_asked_for(refused, bert, data):
    assert "16" in refused("--model", bert, "--train", data, "--max-tokens", 99, code=3)


def test_a_pattern_that_freezes_nothing_is_named(refused, bert, data):
    assert "no.such.layer" in refused("--model", bert, "--train", data, "--freeze", "no.such.layer.*", code=3)


def test_all_mistakes_of_a_recipe_are_told_at_once(refused, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nnam = "x"\n[data]\ntrain = "t"\n[train]\nepochs = 0\n')
    error = refused(recipe, code=3)
    assert "nam" in error
    assert "name" in error
    assert "epochs" in error


def test_resuming_where_no_run_was(refused, bert, data):
    assert "no checkpoint" in refused("--model", bert, "--train", data, "--resume", code=12)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["worker"], 2),
        (["worker", "http://example.org"], 2),
        (["worker", "coterie://127.0.0.1:1/?fp=00#short"], 2),
        (["worker", f"coterie://127.0.0.1:1/?fp={'ab' * 32}#tokentoken", "--memory", "much"], 2),
        (["worker", f"coterie://127.0.0.1:1/?fp={'ab' * 32}#tokentoken", "--speed", "3"], 2),
        (["worker", f"coterie://127.0.0.1:1/?fp={'ab' * 32}#tokentoken"], 16),
        (["verify", "no-such-folder"], 12),
        (["verify", ".", "--steps", "0"], 2),
    ],
)
def test_wrong_links_and_folders_are_refused(words, code, capsys, monkeypatch):
    monkeypatch.delenv("COTERIE_JOIN_LINK", raising=False)
    assert main([*words, "--json"]) == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == code
    assert error["message"]
    assert error["hint"]
    assert "tokentoken" not in error["message"]
