"""`coterie audit`: rates in a table, as JSON and as a plot, for the tasks that send different things."""

import pytest


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "train.csv"
    lines = ["anna lives in paris,good", "bob works for acme,bad", "rome is old,good", "the acme is in rome,bad"]
    file.write_text("text,label\n" + "\n".join(lines) + "\n")
    return file


def test_tagged_words_give_the_rates_of_every_layer(answer, base_model, data):
    code, found = answer("audit", base_model, "--data", data, "--rows", "4")
    tokens = found["tokens"]
    assert code == 0
    assert [layer["layer"] for layer in tokens["layers"]] == [1, 2, 3]
    assert found["rows"] == 4
    assert tokens["sent"] == tokens["sent_text"] == 19  # the words of the four sentences, each with a tag
    assert tokens["candidates"] == found["vocabulary"] - 5  # all but special tokens
    for layer in tokens["layers"]:
        # The tiny model's blocks are new: its activations are still close to embeddings.
        assert layer["by_activation"]["own"] > 0.9
        assert layer["by_embedding"]["own"] > tokens["guess"]["own"]
    assert found["labels"] == {"labels": 19, "recovered": 1.0, "largest_error": None}


def test_a_ladder_from_above_and_a_narrow_upload_are_audited_as_such(answer, base_model, data):
    words = ("audit", base_model, "--data", data, "--first-layer", "3", "--upload", "int4", "--candidates", "13")
    code, found = answer(*words)
    assert code == 0
    assert [layer["layer"] for layer in found["tokens"]["layers"]] == [3]
    assert found["side"]["upload"] == "int4"
    assert found["tokens"]["candidates"] == 13  # the tokens of the four sentences: the only other one stands in none


def test_the_text_has_the_table_and_promises_nothing(told, base_model, texts, tmp_path):
    plot = tmp_path / "leak.png"
    words = ("audit", base_model, "--data", texts, "--task", "sequence-classification", "--plot", plot)
    code, out, _ = told(*words)
    assert code == 0
    assert (
        "4 rows, the tokens that enter the loss as float16: 4 activations of each layer, 0 of them of text tokens"
        in out
    )
    assert "by embedding" in out
    assert "always the same guess" in out
    assert "Labels in direct mode: all, they are sent." in out
    assert "100.0% of 4." in out
    assert "a server that learns to invert activations reads more" in out
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--rows", "0"], 2, "--rows is 0"),
        (["--candidates", "some"], 2, "--candidates is 'some'"),
        (["--upload", "int2"], 3, "upload"),
        (["--first-layer", "9"], 3, "starts at layer 9, and the model has the layers 1 to 3"),
    ],
)
def test_wrong_wishes_are_named(answer, base_model, data, words, code, message):
    found_code, found = answer("audit", base_model, "--data", data, *words)
    assert found_code == code
    assert message in found["error"]["message"]
