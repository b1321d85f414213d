"""`coterie evaluate` and `coterie predict` for labels and scores of whole texts: the folder itself says which."""

import json
import shutil

import msgspec
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import coterie
from coterie.checkpoint.export_record import ExportRecord, read_record, write_record

TEXTS = ("Anna lives in Paris.", "Bob works for Acme", "the old Rome", "is Acme in Rome", "is is is", "Paris Paris")


@pytest.fixture(scope="module")
def labeller(save_labeller):
    return save_labeller(id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})


@pytest.fixture(scope="module")
def scorer(save_labeller):
    return save_labeller(num_labels=1, problem_type="regression")


def plain_logits(folder, *texts):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**AutoTokenizer.from_pretrained(folder)(*texts, padding=True, return_tensors="pt")).logits


def test_a_text_on_the_command_line_gets_the_label_that_plain_transformers_gives(told, labeller):
    code, out, _ = told("predict", labeller, "--text", TEXTS[0], "--text", TEXTS[1])
    expected = [("bad", "good")[int(index)] for index in plain_logits(labeller, list(TEXTS[:2])).argmax(-1)]
    assert code == 0
    assert out == "".join(f"{label}\t{text}\n" for label, text in zip(expected, TEXTS[:2], strict=True))
    assert [row.label for row in coterie.predict(labeller, TEXTS[:2])] == expected


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_answers_on_pairs_are_written_and_can_be_evaluated_as_perfect(answer, labeller, tmp_path, suffix):
    rows = [{"sentence1": one, "sentence2": other} for one, other in zip(TEXTS, reversed(TEXTS), strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / f"answers.{suffix}"
    code, found = answer("predict", labeller, "--data", tmp_path / "pairs.jsonl", "--output", output)
    assert (code, found["rows"]) == (0, len(TEXTS))
    _, figures = answer("evaluate", labeller, "--data", output)
    assert figures["metrics"]["accuracy"] == 1.0
    assert figures["rows"] == figures["details"]["rows_correct"] == len(TEXTS)
    expected = plain_logits(labeller, list(TEXTS), list(reversed(TEXTS))).argmax(-1).tolist()
    lines = output.read_text().strip().splitlines()[-len(TEXTS) :]
    assert ["good" in line for line in lines] == [bool(index) for index in expected]


def test_scores_are_those_of_plain_transformers_with_the_loss_of_its_own(answer, scorer, tmp_path):
    (tmp_path / "a.csv").write_text("text,score\n" + "".join(f"{text},{i / 2}\n" for i, text in enumerate(TEXTS)))
    _, found = answer("predict", scorer, "--data", tmp_path / "a.csv")
    logits = plain_logits(scorer, list(TEXTS)).squeeze(-1)
    assert [row["score"] for row in found["predictions"]] == pytest.approx(logits.tolist(), abs=1e-5)
    _, figures = answer("evaluate", scorer, "--data", tmp_path / "a.csv")
    gold = torch.arange(len(TEXTS)) / 2
    assert figures["loss"] == pytest.approx(torch.nn.functional.mse_loss(logits, gold).item(), rel=1e-5)
    assert set(figures["metrics"]) == {"spearman", "pearson"}
    (tmp_path / "out").mkdir()
    answer("predict", scorer, "--text", TEXTS[0], "--output", tmp_path / "out" / "a.txt")
    assert float((tmp_path / "out" / "a.txt").read_text()) == pytest.approx(float(logits[0]), rel=1e-4)


def test_a_model_whose_labels_nobody_named_is_evaluated_by_numbers(answer, save_labeller, tmp_path):
    folder = save_labeller(num_labels=3)
    labels = plain_logits(folder, list(TEXTS)).argmax(-1).tolist()
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, figures = answer("evaluate", folder, "--data", tmp_path / "a.jsonl")
    assert figures["metrics"]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text,label\nx,awful\n", "none of its labels (awful) is one of the model's (bad, good)"),
        ("text,kind\nx,bad\n", "there is no column label"),
        ('text,label\n"x,bad\n', "broken CSV"),
    ],
)
def test_data_of_another_kind_are_refused(answer, labeller, tmp_path, content, words):
    (tmp_path / "a.csv").write_text(content)
    code, found = answer("evaluate", labeller, "--data", tmp_path / "a.csv")
    assert code == 4
    assert words in found["error"]["message"]


def test_an_unknown_suffix_is_refused(answer, labeller):
    code, found = answer("predict", labeller, "--text", "a", "--output", "answers.conll")
    assert code == 2
    assert found["error"]["hint"] == "end it in .txt or .jsonl or .csv"


def learnt(folder, tmp_path, **facts):
    """The same model with a record of what it learnt."""
    copy = tmp_path / "learnt"
    shutil.copytree(folder, copy)
    write_record(copy, ExportRecord(coterie="0", run_id="r", step=1, files=(), task="sequence-classification", **facts))
    return copy


def test_a_pair_on_the_command_line_gets_the_label_that_plain_transformers_gives(told, labeller, tmp_path):
    folder = learnt(labeller, tmp_path, pairs=True)
    code, out, _ = told("predict", folder, "--text", TEXTS[0], "--pair", TEXTS[1], "--text", TEXTS[2], "--pair", "is")
    expected = plain_logits(labeller, [TEXTS[0], TEXTS[2]], [TEXTS[1], "is"]).argmax(-1)
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == [("bad", "good")[int(index)] for index in expected]
    assert len(coterie.predict(folder, [(TEXTS[0], TEXTS[1])])) == 1


def test_single_texts_are_refused_by_a_model_of_pairs_and_pairs_by_one_of_single_texts(answer, labeller, tmp_path):
    folder = learnt(labeller, tmp_path, pairs=True)
    code, found = answer("predict", folder, "--text", TEXTS[0])
    assert code == 4
    assert "one text each" in found["error"]["message"]
    assert "--pair" in found["error"]["hint"]
    write_record(folder, msgspec.structs.replace(read_record(folder), pairs=False))
    code, found = answer("predict", folder, "--text", TEXTS[0], "--pair", TEXTS[1])
    assert code == 4
    assert "learnt from single texts" in found["error"]["message"]
    assert answer("predict", folder, "--text", TEXTS[0])[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text", "a", "--text", "b", "--pair", "c"), "--text is given 2 times and --pair 1 time"),
        (("--pair", "c"), "--text is given 0 times and --pair 1 time"),
        (("--text", "a", "--pair", "b", "--task", "token-classification"), "take single texts, not pairs"),
        (("--text", "a", "--pair", "b", "--text-column", "text"), "stand in no columns of a file"),
    ],
)
def test_pairs_that_cannot_be_are_refused(answer, labeller, words, message):
    code, found = answer("predict", labeller, *words)
    assert code == 2
    assert message in found["error"]["message"]


def test_rows_longer_than_those_that_were_learnt_are_cut_and_told_of(told, labeller, tmp_path):
    folder = learnt(labeller, tmp_path, max_tokens=5)
    _, short, notes = told("predict", folder, "--text", TEXTS[0])
    expected = ("bad", "good")[int(plain_logits(labeller, ["Anna lives in"]).argmax())]
    assert short.startswith(expected)
    assert "1 row of more than 5 tokens" in notes
    _, _, notes = told("predict", folder, "--text", TEXTS[0], "--max-tokens", "20")
    assert "tokens" not in notes
