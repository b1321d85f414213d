"""Whole runs: the curve of one device whatever the cut, equal quality, and a model that plain libraries load."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

from coterie import api
from coterie.coordinator.one_device import largest_difference
from coterie.errors import CheckpointError
from coterie.metrics.records import EvaluationRecord
from coterie.worker.settings import WorkerSettings


def quality(watcher):
    return {
        record.split: (record.loss, record.metrics)
        for record in watcher.records
        if isinstance(record, EvaluationRecord)
    }


@pytest.fixture(scope="module")
def three(tmp_path_factory, make_recipe, cluster, run):
    """One run over three workers; several tests look at it."""
    recipe = make_recipe(tmp_path_factory.mktemp("three") / "run", epochs=6)
    watcher = cluster()
    return recipe, watcher, run(recipe, watcher)


def test_three_workers_give_the_losses_of_one_device_with_dropout_on(three, alone):
    recipe, watcher, result = three
    assert len(result.plan.stages) == 3
    assert len(result.losses) == 54
    assert largest_difference(result.losses, alone(recipe, 54)) < 1e-5
    assert result.losses[-1] < result.losses[0] / 3
    assert watcher.failures == {}


def test_one_worker_measures_the_same_quality_as_three(three, tmp_path, make_recipe, cluster, run):
    _, watcher, _ = three
    single = cluster(WorkerSettings(name="only"))
    result = run(make_recipe(tmp_path / "run", epochs=6, workers=1), single)
    found, expected = quality(single), quality(watcher)
    assert set(found) == set(expected) == {"dev", "test"}
    for split, (loss, metrics) in expected.items():
        assert found[split][0] == pytest.approx(loss, rel=1e-5)
        assert found[split][1] == pytest.approx(metrics)
    assert expected["test"][1]["entity_f1"] > 0.3
    assert any("one device alone is enough" in note for note in result.plan.notes)
    assert "one device alone is enough" in single.explanation


def test_the_exported_model_loads_in_plain_transformers_and_finds_entities(three):
    _, _, result = three
    model = AutoModelForTokenClassification.from_pretrained(result.model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    with torch.no_grad():
        logits = model(**tokenizer(["anna works in paris"], return_tensors="pt")).logits
    tags = [model.config.id2label[int(index)] for index in logits[0].argmax(-1)[1:-1]]
    assert tags == ["B-PER", "O", "O", "B-LOC"]


def test_the_model_card_says_what_was_trained_on_what_and_how_well(three):
    recipe, watcher, result = three
    card = (result.model_folder / "README.md").read_text()
    assert f"| trained on | {Path(recipe.data.train).name}, 36 rows |" in card
    assert recipe.data.train not in card
    assert "pipeline_tag: token-classification" in card
    assert f"| test entity_f1 | {quality(watcher)['test'][1]['entity_f1']:.4g} |" in card


def test_the_run_folder_holds_recipe_events_plot_summary_model_and_checkpoints(three):
    _, _, result = three
    names = {path.name for path in result.run_folder.iterdir()}
    assert names >= {"recipe.toml", "events.jsonl", "training.png", "summary.json", "model", "checkpoints"}
    summary = json.loads((result.run_folder / "summary.json").read_text())
    assert summary["steps"] == 54
    assert summary["epochs"] == 6
    assert {device["device_name"] for device in summary["devices"]} == {"device-a", "device-b", "device-c"}
    assert all(link["forward_bytes"] > 0 and link["path"] == "unix" for link in summary["links"])


def test_a_finished_run_is_not_trained_again(three, cluster):
    recipe, _, result = three
    again = msgspec.structs.replace(recipe, run=msgspec.structs.replace(recipe.run, resume=True))
    before = (result.run_folder / "summary.json").read_bytes()
    with pytest.raises(CheckpointError, match="54 of 54 steps") as caught:
        api.train(again, cluster())
    assert str(result.model_folder) in caught.value.message
    assert (result.run_folder / "summary.json").read_bytes() == before


# PEFT asks a transformers model for an attribute that transformers is about to rename.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_trains_adapters_that_plain_peft_loads(tmp_path, make_recipe, cluster, model, run, alone):
    recipe = make_recipe(tmp_path / "run", method="lora", lora_dropout=0.1)
    watcher = cluster()
    result = run(recipe, watcher)
    assert largest_difference(result.losses, alone(recipe, 9)) < 1e-6
    config = AutoConfig.from_pretrained(result.model_folder)
    base = AutoModelForTokenClassification.from_pretrained(model, config=config)
    loaded = PeftModel.from_pretrained(base, result.model_folder)
    assert any("lora_B" in name and parameter.abs().sum() > 0 for name, parameter in loaded.named_parameters())


def test_a_frozen_embedding_stays_as_it_was(tmp_path, make_recipe, cluster, model, run, alone):
    recipe = make_recipe(tmp_path / "run", freeze=("embeddings",), max_steps=4)
    watcher = cluster()
    result = run(recipe, watcher)
    assert largest_difference(result.losses, alone(recipe, 4)) < 1e-6
    trained = AutoModelForTokenClassification.from_pretrained(result.model_folder).state_dict()
    before = AutoModelForTokenClassification.from_pretrained(
        model, config=AutoConfig.from_pretrained(result.model_folder)
    ).state_dict()
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(trained[name], before[name])
    layer = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(trained[layer], before[layer])


@pytest.mark.parametrize("schedule", ["stash", pytest.param("2bw", marks=pytest.mark.slow)])
def test_schedules_that_never_flush_run_to_the_end(schedule, tmp_path, make_recipe, cluster, run):
    watcher = cluster()
    result = run(make_recipe(tmp_path / "run", schedule=schedule, epochs=2, micro_batches=4), watcher)
    assert len(result.losses) == 18
    assert result.losses[-1] < result.losses[0]
    assert result.plan.schedule == schedule
    assert watcher.failures == {}
