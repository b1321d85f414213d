"""`coterie evaluate` and `coterie.evaluate`: the same figures wherever the model runs."""

from pathlib import Path

import pytest
from seqeval.metrics import f1_score
from transformers import AutoModelForTokenClassification, AutoTokenizer

import coterie

SENTENCES_WITH_ONE_MORE_TYPE = "Anna\tB-PER\nlives\tO\n\nMay\tB-MONTH\n"


def tags_by_transformers(folder: Path, sentences: list[list[str]]) -> list[list[str]]:
    """What plain transformers says, a sentence at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    found = []
    for words in sentences:
        encoded = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        labels = model(**encoded).logits.argmax(-1)[0].tolist()
        places = encoded.word_ids(0)
        found.append([model.config.id2label[labels[places.index(word)]] for word in range(len(words))])
    return found


def read_conll(path: Path) -> tuple[list[list[str]], list[list[str]]]:
    blocks = [block.splitlines() for block in path.read_text().strip().split("\n\n")]
    pairs = [[line.split("\t") for line in block] for block in blocks]
    return [[word for word, _ in block] for block in pairs], [[tag for _, tag in block] for block in pairs]


def test_the_figures_are_those_of_seqeval_on_the_answers_of_plain_transformers(answer, tagger, data):
    code, found = answer("evaluate", tagger, "--data", data)
    words, gold = read_conll(data)
    assert code == 0
    assert found["rows"] == 4
    assert found["metrics"]["entity_f1"] == pytest.approx(f1_score(gold, tags_by_transformers(tagger, words)))
    assert found["details"]["entities_gold"] == 7
    assert found["loss"] > 0
    assert found["devices"] == 1


def test_the_report_has_a_line_per_type_and_the_main_figure_last(told, tagger, data):
    code, out, _ = told("evaluate", tagger, "--data", data)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines if line.startswith(("LOC", "ORG", "PER"))] == ["LOC", "ORG", "PER"]
    assert lines[-1].startswith("entity_f1 ")
    assert "4 rows" in lines[-1]


def test_python_gives_what_the_command_gives(answer, tagger, data):
    _, found = answer("evaluate", tagger, "--data", data)
    record = coterie.evaluate(tagger, data).record
    assert record.metrics == found["metrics"]
    assert record.loss == found["loss"]


def test_small_batches_change_nothing(answer, tagger, data):
    _, whole = answer("evaluate", tagger, "--data", data)
    _, single = answer("evaluate", tagger, "--data", data, "--batch-rows", "1")
    assert single["metrics"] == whole["metrics"]
    assert single["loss"] == pytest.approx(whole["loss"], rel=1e-6)


@pytest.mark.slow
def test_two_devices_give_the_figures_of_one(answer, tagger, data):
    _, alone = answer("evaluate", tagger, "--data", data)
    code, found = answer(
        *("evaluate", tagger, "--data", data, "--min-workers", "2"),
        *("--local-worker", "name=a", "--local-worker", "name=b"),
    )
    assert code == 0
    assert found["devices"] == 2
    assert found["metrics"] == alone["metrics"]
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_a_folder_of_splits_gives_the_split_that_is_asked_for(answer, tagger, data, tmp_path):
    (tmp_path / "dev.conll").write_bytes(data.read_bytes())
    (tmp_path / "test.conll").write_text("Anna\tB-PER\n")
    _, dev = answer("evaluate", tagger, "--data", tmp_path, "--split", "dev")
    _, test = answer("evaluate", tagger, "--data", tmp_path)
    assert (dev["split"], dev["rows"]) == ("dev", 4)
    assert (test["split"], test["rows"]) == ("test", 1)


def test_entities_of_a_type_that_the_model_does_not_know_are_missed_and_said(told, tagger, tmp_path):
    path = tmp_path / "more.conll"
    path.write_text(SENTENCES_WITH_ONE_MORE_TYPE)
    code, out, _ = told("evaluate", tagger, "--data", path)
    assert code == 0
    assert "B-MONTH" in out
    assert any(line.startswith("MONTH") and "0.0%" in line for line in out.splitlines())


def test_a_model_without_a_trained_classifier_is_refused(answer, base_model, data):
    code, found = answer("evaluate", base_model, "--data", data)
    assert code == 5
    assert "classifier" in found["error"]["message"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--data", "no-such-file.conll"], 4, "no-such-file.conll"),
        (["--data", "x", "--port", "99999"], 3, "port"),
        (["--data", "x", "--split", "all"], 2, "--split"),
        ([], 2, "--data"),
    ],
)
def test_wrong_input_is_named(answer, tagger, words, code, message):
    found_code, found = answer("evaluate", tagger, *words)
    assert found_code == code
    assert message in found["error"]["message"]


def test_a_folder_that_is_not_there_is_named(answer, data, tmp_path):
    code, found = answer("evaluate", tmp_path / "nowhere", "--data", data)
    assert code == 5
    assert "nowhere" in found["error"]["message"]
