"""Side-tuning from a recipe to an exported folder: devices that run forward once, a server that trains."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coterie.cli.main import main
from coterie.coordinator.job import prepare_job
from coterie.coordinator.side_here import SideHere
from coterie.errors import ActivationCacheError, CheckpointError, RecipeError, UsageError
from coterie.ids import RunId
from coterie.metrics.records import EvaluationRecord, SummaryRecord
from coterie.planner.side_bytes import Backbone, TokenCounts, upload_bytes
from coterie.sidetuning.side_network import PREFIX
from coterie.worker.settings import WorkerSettings

SERVER = WorkerSettings(name="server", role="server")
PHONES = tuple(WorkerSettings(name=f"phone-{letter}") for letter in "abc")
OPTIONS = {
    "mode": "side",
    "workers": 2,
    "min_workers": 1,
    "epochs": 2,
    "learning_rate": 5e-3,
    "side-rank": 8,
    "upload": "float32",
}


def trained_in(folder: Path) -> dict[str, torch.Tensor]:
    """All that a run has trained, from its exported folder."""
    network = load_file(folder / "side_network.safetensors")
    return load_file(folder / "task_layers.safetensors") | {PREFIX + name: tensor for name, tensor in network.items()}


def unequal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    assert some.keys() == others.keys()
    return [name for name, tensor in some.items() if not torch.equal(tensor, others[name])]


@pytest.fixture(scope="module")
def one(tmp_path_factory, make_recipe, cluster, run):
    """A run over one device, its recipe and what was seen of it."""
    recipe = make_recipe(tmp_path_factory.mktemp("one") / "run", **OPTIONS)
    watcher = cluster(PHONES[0], SERVER)
    return recipe, run(recipe, watcher), watcher


def test_a_device_and_a_server_train_what_one_process_trains(one):
    recipe, result, watcher = one
    here = SideHere(prepare_job(recipe, RunId("here"), lambda _text: None), micro_batches=2)
    assert list(here.train(18)) == watcher.losses
    assert unequal(trained_in(result.model_folder), here.trained()) == []
    assert watcher.losses[-1] < 0.7 * watcher.losses[0]
    assert watcher.failures == {}


def test_the_devices_run_once_and_send_what_the_formulas_count(one):
    recipe, result, watcher = one
    (summary,) = (record for record in watcher.records if isinstance(record, SummaryRecord))
    tokens = 0
    for split in ("train", "dev", "test"):
        tokens += sum(int((row.labels != -100).sum()) for row in prepare_rows(recipe, split))
    counts = TokenCounts(padded=0, real=0, selected=tokens)
    counted = upload_bytes(counts, Backbone(blocks=4, width=32), recipe.side.spec)
    assert summary.side.taps_bytes == counted
    assert summary.side.device_passes == 1
    assert counted < summary.side.wire_bytes
    assert summary.side.fetched_bytes == sum(tensor.nbytes for tensor in trained_in(result.model_folder).values())
    assert summary.side.cache_bytes >= counted


def test_the_peak_of_the_server_is_what_was_predicted(one):
    _, _, watcher = one
    (summary,) = (record for record in watcher.records if isinstance(record, SummaryRecord))
    (server,) = (device for device in summary.devices if device.device_name == "server")
    assert server.predicted_peak_bytes == pytest.approx(server.measured_peak_bytes, rel=0.15)
    assert server.predicted_peak_bytes > server.base_bytes


def prepare_rows(recipe, split):
    return prepare_job(recipe, RunId("rows"), lambda _text: None).splits[split].rows


def test_quality_is_measured_after_each_epoch_and_at_the_end(one):
    _, _, watcher = one
    found = [(record.split, record.step) for record in watcher.records if isinstance(record, EvaluationRecord)]
    assert found == [("dev", 9), ("dev", 18), ("test", 18)]


def test_three_devices_collect_what_one_collects(tmp_path, one, make_recipe, cluster, run):
    recipe = make_recipe(tmp_path / "run", **OPTIONS | {"workers": 4, "min_workers": 3, "cuts": [2, 4]})
    watcher = cluster(*PHONES, SERVER)
    result = run(recipe, watcher)
    assert [(stage.first_unit, stage.stop_unit) for stage in result.plan.stages] == [(0, 2), (2, 4), (4, 5)]
    assert watcher.losses == one[2].losses
    assert unequal(trained_in(result.model_folder), trained_in(one[1].model_folder)) == []


def test_without_a_direct_link_the_coordinator_passes_activations_on(tmp_path, one, make_recipe, cluster, run):
    closed = WorkerSettings(name="server", role="server", direct_links=False)
    watcher = cluster(PHONES[0], closed)
    result = run(make_recipe(tmp_path / "run", **OPTIONS | {"epochs": 2}), watcher)
    assert any("goes through the coordinator" in notice for notice in watcher.notices)
    assert unequal(trained_in(result.model_folder), trained_in(one[1].model_folder)) == []


def test_what_does_not_fit_the_quota_is_refused_before_anything_is_sent(tmp_path, make_recipe, cluster, run):
    watcher = cluster(PHONES[0], SERVER)
    with pytest.raises(ActivationCacheError, match=r"quota of 20\.0 KiB"):
        run(make_recipe(tmp_path / "run", **OPTIONS | {"cache_quota": "20KiB"}), watcher)
    assert watcher.losses == []


def test_rows_that_are_added_to_a_cache_are_refused_before_they_are_sent_if_they_do_not_fit(
    tmp_path, data, make_recipe, cluster, run
):
    server = WorkerSettings(name="server", role="server", cache_folder=tmp_path / "kept")
    options = OPTIONS | {"epochs": 1, "cache_quota": "150KiB", "evaluate_every_epoch": False}
    run(
        make_recipe(tmp_path / "run", **options | {"data.train": str(data / "train.conll")}), cluster(PHONES[0], server)
    )
    more = tmp_path / "more.conll"
    more.write_text((data / "train.conll").read_text() + (data / "dev.conll").read_text() * 30)
    watcher = cluster(PHONES[0], server)
    with pytest.raises(ActivationCacheError, match=r"selected tokens need .* quota of 150 KiB, .* are used"):
        run(make_recipe(tmp_path / "next", **options | {"data.train": str(more)}), watcher)
    assert watcher.losses == []


def test_without_two_phases_training_rows_take_nothing_of_the_quota(tmp_path, data, make_recipe, cluster, run):
    watcher = cluster(PHONES[0], SERVER)
    options = OPTIONS | {"epochs": 1, "cache_quota": "20KiB", "two_phases": False}
    run(make_recipe(tmp_path / "run", **options | {"data.train": str(data / "train.conll")}), watcher)
    assert len(watcher.losses) == 9


def test_what_cannot_be_side_tuned_is_refused_before_anybody_joins(tmp_path, make_recipe, cluster, run, one):
    watcher = cluster(PHONES[0], SERVER)
    with pytest.raises(RecipeError, match="layers 1 to 4"):
        run(make_recipe(tmp_path / "run", **OPTIONS | {"first_layer": 5}), watcher)
    with pytest.raises(CheckpointError, match="no side-tuning run to resume"):
        run(make_recipe(tmp_path / "other", resume=True, **OPTIONS), watcher)
    with pytest.raises(UsageError, match="earlier side-tuning run"):
        run(make_recipe(one[1].run_folder, **OPTIONS), watcher)
    with pytest.raises(CheckpointError, match="side differ"):
        run(make_recipe(one[1].run_folder, resume=True, **OPTIONS | {"upload": "int8"}), watcher)
    assert watcher.threads == []


def test_verify_repeats_a_run_whatever_it_sends_and_keeps(tmp_path, make_recipe, cluster, run, capsys):
    options = OPTIONS | {"upload": "int8", "two_phases": False, "token_selector": False, "additive": True}
    run(make_recipe(tmp_path / "run", **options), cluster(PHONES[0], SERVER))
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "same loss curve as one device: yes (18 steps, largest relative difference 0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"token_selector": False, "two_phases": False}, 1e-4),
        ({"upload": "float16", "cache": "memory"}, 1e-2),
        ({"upload": "int4", "first_layer": 3}, None),
    ],
)
def test_every_variant_trains(tmp_path, one, make_recipe, cluster, run, options, largest):
    watcher = cluster(PHONES[0], SERVER)
    result = run(make_recipe(tmp_path / "run", **OPTIONS | options), watcher)
    assert len(watcher.losses) == 18
    assert watcher.failures == {}
    if largest is not None:
        assert watcher.losses == pytest.approx(one[2].losses, abs=largest)
    assert trained_in(result.model_folder)
