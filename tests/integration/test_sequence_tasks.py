"""Labels and scores for whole texts, end to end: trained over workers, exported, evaluated, predicted."""

import json
import random
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
)

from coterie import api
from coterie.coordinator.job import prepare_job
from coterie.coordinator.one_device import largest_difference, run_on_one_device
from coterie.errors import DataError, StorageError
from coterie.ids import RunId
from coterie.metrics.records import StepRecord
from coterie.worker.settings import WorkerSettings

PLACES = ("paris", "rome", "oslo", "lima", "cairo")
FIRMS = ("acme", "globex", "initech", "umbrella")
OTHER = ("lives", "works", "in", "for", "near", "the", "old", "new", "office")
WORDS = ("<end>", "<unk>", *PLACES, *FIRMS, *OTHER)


def text(draw: random.Random, kind: tuple[str, ...]) -> str:
    words = [draw.choice(kind), *draw.choices(OTHER, k=draw.randint(1, 6))]
    draw.shuffle(words)
    return " ".join(words)


def write_pairs(path: Path, count: int, seed: int) -> None:
    """Both texts of a pair are about a place, or about a firm, or not: each is one of two kinds."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        kind = draw.choice((PLACES, FIRMS))
        label = "places" if kind is PLACES else "firms"
        rows.append({"sentence1": text(draw, kind), "sentence2": text(draw, kind), "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_scores(path: Path, count: int, seed: int) -> None:
    """The score of a text is the share of its words that are places, with a few scores missing."""
    draw = random.Random(seed)
    lines = ["text,score"]
    for index in range(count):
        words = [draw.choice(draw.choice((PLACES, FIRMS))) for _ in range(draw.randint(1, 6))]
        score = sum(word in PLACES for word in words) / len(words)
        lines.append(f"{' '.join(words)},{'' if index % 9 == 8 else score}")
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def two_settings():
    return tuple(WorkerSettings(name=name) for name in ("left", "right"))


def run(recipe, watcher):
    try:
        return api.train(recipe, watcher)
    finally:
        watcher.wait()


def alone(recipe, steps):
    job = prepare_job(recipe, RunId("alone"), lambda _text: None)
    return run_on_one_device(job, recipe.train.micro_batches, steps).losses


def plain_logits(model, folder, *texts):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(**tokenizer(*texts, padding=True, return_tensors="pt")).logits


def test_pairs_get_labels_over_two_workers(tmp_path, make_recipe, cluster, two_settings):
    data = tmp_path / "data"
    data.mkdir()
    for seed, (split, count) in enumerate({"train": 32, "test": 20}.items()):
        write_pairs(data / f"{split}.jsonl", count, seed)
    recipe = make_recipe(
        tmp_path / "run", workers=2, epochs=3, task="sequence-classification", **{"data.train": str(data)}
    )
    watcher = cluster(*two_settings)
    result = run(recipe, watcher)
    assert watcher.failures == {}
    assert len(result.plan.stages) == 2
    assert len(result.losses) == 24
    assert largest_difference(result.losses, alone(recipe, 8)) < 1e-5
    quality = {record.split: record for record in result.quality}
    assert set(quality["test"].metrics) == {"accuracy", "macro_f1", "matthews", "binary_f1"}

    model, info = AutoModelForSequenceClassification.from_pretrained(result.model_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.id2label == {0: "firms", 1: "places"}
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
    logits = plain_logits(
        model, result.model_folder, [row["sentence1"] for row in rows], [row["sentence2"] for row in rows]
    )
    expected = [model.config.id2label[int(index)] for index in logits.argmax(-1)]
    right = sum(label == row["label"] for label, row in zip(expected, rows, strict=True))
    assert quality["test"].metrics["accuracy"] == pytest.approx(right / len(rows))
    answers = api.predict(result.model_folder, data / "test.jsonl")
    assert [row.label for row in answers] == expected
    found = api.evaluate(result.model_folder, data)
    assert found.record.metrics == pytest.approx(quality["test"].metrics)
    assert found.record.loss == pytest.approx(quality["test"].loss, rel=1e-4)
    pair = rows[0]["sentence1"], rows[0]["sentence2"]
    assert [row.label for row in api.predict(result.model_folder, [pair])] == expected[:1]
    with pytest.raises(DataError, match=r"one text each, and .* learnt from pairs"):
        api.predict(result.model_folder, ["anna lives in rome"])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A decoder whose tokenizer and config have no pad token."""
    folder = tmp_path_factory.mktemp("gpt2") / "tiny-gpt2"
    torch.manual_seed(2)
    GPT2Model(GPT2Config(vocab_size=len(WORDS), n_embd=32, n_layer=3, n_head=4, n_positions=32)).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return folder


# PEFT asks a transformers model for an attribute that transformers is about to rename.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_texts_get_scores_by_adapters_on_a_decoder_without_a_pad_token(
    tmp_path, make_recipe, cluster, two_settings, gpt2
):
    for seed, (split, count) in enumerate({"train": 45, "test": 27}.items()):
        write_scores(tmp_path / f"{split}.csv", count, seed)
    options = {"model.name": str(gpt2), "data.train": str(tmp_path), "method": "lora", "learning_rate": 2e-2}
    recipe = make_recipe(tmp_path / "run", workers=2, epochs=3, task="regression", **options)
    watcher = cluster(*two_settings)
    result = run(recipe, watcher)
    assert watcher.failures == {}
    assert len(result.plan.stages) == 2
    assert any("5 rows have no label left and are skipped" in note for note in watcher.notices)
    assert sum("no pad token: '<end>'" in note for note in watcher.notices) == 2
    assert largest_difference(result.losses, alone(recipe, 8)) < 1e-5
    (quality,) = result.quality
    assert quality.main_metric == "spearman"
    assert quality.details["rows"] == 24

    config = AutoConfig.from_pretrained(result.model_folder)
    assert (config.pad_token_id, config.num_labels, config.problem_type) == (0, 1, "regression")
    assert AutoTokenizer.from_pretrained(result.model_folder).pad_token == "<end>"
    base = AutoModelForSequenceClassification.from_pretrained(gpt2, config=config)
    model = PeftModel.from_pretrained(base, result.model_folder)
    answers = api.predict(result.model_folder, tmp_path / "test.csv")
    logits = plain_logits(model, result.model_folder, [row.text for row in answers])
    assert [row.score for row in answers] == pytest.approx(logits.squeeze(-1).tolist(), abs=1e-5)
    gold = [line.rpartition(",")[2] for line in (tmp_path / "test.csv").read_text().splitlines()[1:]]
    known = [(float(score), row.score) for score, row in zip(gold, answers, strict=True) if score]
    assert quality.metrics["spearman"] == pytest.approx(spearmanr(*zip(*known, strict=True)).statistic)

    there = cluster(*two_settings)
    options = {"workers": 2, "min_workers": 2, "host": "127.0.0.1", "join_timeout_s": 200}
    over_workers = api.evaluate(result.model_folder, tmp_path / "test.csv", observer=there, **options)
    there.wait()
    assert len(over_workers.plan.stages) == 2
    assert over_workers.record.metrics == pytest.approx(quality.metrics, rel=1e-4)


def test_a_run_on_scores_resumes_to_the_losses_of_an_undisturbed_one(tmp_path, make_recipe, cluster, changed):
    write_scores(tmp_path / "train.csv", 16, 5)
    options = {"data.train": str(tmp_path / "train.csv"), "checkpoint_every": 1, "max_steps": 3}
    recipe = make_recipe(tmp_path / "run", workers=1, task="regression", **options)
    watcher = cluster(WorkerSettings(name="only"))

    def fail(record):
        if isinstance(record, StepRecord) and record.step == 2:
            raise StorageError("the test's disk is full")

    watcher.on_record = fail
    with pytest.raises(StorageError, match="disk is full"):
        run(recipe, watcher)
    result = run(changed(recipe, "run", resume=True), cluster(WorkerSettings(name="other")))
    assert len(result.losses) == 1
    assert largest_difference(result.losses, alone(recipe, 3)[2:]) < 1e-6


@pytest.mark.parametrize("additive", [False, True])
def test_texts_get_scores_from_a_network_beside_a_decoder(tmp_path, make_recipe, cluster, gpt2, additive):
    for seed, (split, count) in enumerate({"train": 45, "test": 27}.items()):
        write_scores(tmp_path / f"{split}.csv", count, seed)
    options = {"model.name": str(gpt2), "data.train": str(tmp_path), "learning_rate": 1e-2, "rank": 8}
    options |= {"mode": "side", "additive": additive, "task": "regression", "workers": 3, "epochs": 3}
    recipe = make_recipe(tmp_path / "run", min_workers=2, **options)
    server = WorkerSettings(name="server", role="server")
    watcher = cluster(WorkerSettings(name="one"), WorkerSettings(name="two"), server)
    result = run(recipe, watcher)
    assert watcher.failures == {}
    assert result.losses[-1] < result.losses[0]
    (quality,) = result.quality
    assert quality.details["rows"] == 24
    found = api.evaluate(result.model_folder, tmp_path / "test.csv").record
    assert found.metrics == pytest.approx(quality.metrics, abs=1e-3)


def test_pairs_get_labels_from_a_network_beside_an_encoder(tmp_path, make_recipe, cluster):
    data = tmp_path / "data"
    data.mkdir()
    for seed, (split, count) in enumerate({"train": 32, "test": 20}.items()):
        write_pairs(data / f"{split}.jsonl", count, seed)
    options = {"mode": "side", "workers": 2, "min_workers": 1, "epochs": 3, "learning_rate": 1e-2, "rank": 8}
    recipe = make_recipe(tmp_path / "run", task="sequence-classification", **{"data.train": str(data)}, **options)
    watcher = cluster(WorkerSettings(name="phone"), WorkerSettings(name="server", role="server"))
    result = run(recipe, watcher)
    assert watcher.failures == {}
    (quality,) = result.quality
    found = api.evaluate(result.model_folder, data / "test.jsonl").record
    assert found.metrics == pytest.approx(quality.metrics)
    assert found.loss == pytest.approx(quality.loss, rel=1e-3)
