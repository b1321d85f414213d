"""Side-tuning from a recipe to an exported folder: devices that run forward once, a server that trains."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coterie.coordinator.job import prepare_job
from coterie.coordinator.shards import ShardSource
from coterie.coordinator.side_feeding import SideFeeder
from coterie.coordinator.side_spec import backbone_spec
from coterie.ids import RunId
from coterie.metrics.records import EvaluationRecord, SummaryRecord
from coterie.models import MappingWeights, build_stage
from coterie.planner.side_bytes import Backbone, TokenCounts, upload_bytes
from coterie.sidetuning.activations import ActivationBatch, join_rows
from coterie.sidetuning.readout import TokenSelector
from coterie.sidetuning.side_model import build_side_model
from coterie.sidetuning.side_network import PREFIX
from coterie.sidetuning.taps import TappedStage
from coterie.sidetuning.trainer import SideTrainer
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


def trained_here(recipe, epochs: int) -> dict[str, torch.Tensor]:
    """The same in this process alone: the parts of side-tuning without any worker."""
    job = prepare_job(recipe, RunId("here"), lambda _text: None)
    side, last = recipe.side.spec, job.anatomy.unit_count - 1

    def tensors(spec, units):
        source = ShardSource(spec, job.weights, None)
        read = {name: tensor for unit in units for name, tensor in source.read(unit).items()}
        return MappingWeights({name.removeprefix("param/"): tensor for name, tensor in read.items()})

    backbone = backbone_spec(job.spec)
    stage = TappedStage(build_stage(backbone, 0, last, tensors(backbone, range(last))), side.first_layer)
    feeder = SideFeeder(job, TokenSelector(job.spec, side), recipe.train.micro_batches)
    parts = []
    for due in feeder.due_in_steps(0, job.steps_per_epoch):
        item = feeder.item(0, due)
        inputs = {name: torch.from_numpy(array) for name, array in item.batch.inputs.items()}
        _, taps = stage.forward(inputs, None, item.selection)
        parts.append(
            ActivationBatch(
                samples=torch.tensor(due.rows),
                counts=item.selection.counts,
                layers=stage.layers,
                taps=torch.stack([taps[layer] for layer in stage.layers], 1),
                labels=item.selection.loss_labels(torch.from_numpy(item.batch.labels)),
                loss_index=item.selection.loss_index,
            )
        )
    every = join_rows(parts)
    place = {sample: index for index, sample in enumerate(every.samples.tolist())}
    model = build_side_model(job.spec, side, tensors(job.spec, [last]))
    trainer = SideTrainer(model, job.task, job.optimizer)
    for step in range(epochs * job.steps_per_epoch):
        rows = feeder.training.rows(step)
        trainer.step(every.pick([place[row] for row in rows.rows]), rows.samples_seen)
    return {name: parameter.detach() for name, parameter in model.parameters().items()}


@pytest.fixture(scope="module")
def one(tmp_path_factory, make_recipe, cluster, run):
    """A run over one device, its recipe and what was seen of it."""
    recipe = make_recipe(tmp_path_factory.mktemp("one") / "run", **OPTIONS)
    watcher = cluster(PHONES[0], SERVER)
    return recipe, run(recipe, watcher), watcher


def test_a_device_and_a_server_train_what_one_process_trains(one):
    recipe, result, watcher = one
    assert unequal(trained_in(result.model_folder), trained_here(recipe, epochs=2)) == []
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


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"token_selector": False, "upload": "float32"}, 1e-4),
        ({"two_phases": False, "upload": "float32"}, 1e-4),
        ({"upload": "float16", "cache": "memory"}, 1e-2),
        ({"upload": "int8"}, 0.05),
        ({"upload": "int4"}, 0.5),
        ({"first_layer": 3}, None),
        ({"additive": True}, None),
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
