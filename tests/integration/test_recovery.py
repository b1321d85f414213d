"""Devices that are lost in mid-run: training goes on, and ends with the weights of a run that nothing happened to."""

import json
import signal
import threading

import psutil
import pytest
import torch

from coterie import api
from coterie.api import training
from coterie.checkpoint.names import checkpoint_folder
from coterie.checkpoint.store import CheckpointStore
from coterie.coordinator.run import TrainingRun
from coterie.metrics.records import MembershipRecord, RecoveryRecord, StepRecord
from coterie.worker.settings import WorkerSettings

STEPS = 12


class Saboteur:
    """Breaks the link of whoever has a stage, once a step has ended."""

    def __init__(self, monkeypatch):
        self.runs = []
        saboteur = self

        class Watched(TrainingRun):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                saboteur.runs.append(self)

        monkeypatch.setattr(training, "TrainingRun", Watched)

    def at(self, watcher, *cuts):
        """`cuts`: after which step the link to which stage's worker is to break."""
        due = dict(cuts)

        def cut(record):
            if isinstance(record, StepRecord) and record.step in due:
                stage = due.pop(record.step)
                members = self.runs[-1].session.members
                worker = record.workers[stage].worker
                members.by_id[worker].link.abort()

        watcher.on_record = cut


@pytest.fixture
def saboteur(monkeypatch):
    return Saboteur(monkeypatch)


def final_state(recipe):
    """All trained tensors of a finished run, the optimizer's too."""
    checkpoint = CheckpointStore(checkpoint_folder(recipe.run.output)).latest()
    parameters, state = checkpoint.read(checkpoint.manifest.unit_of)
    found = dict(parameters)
    for name, fields in state.items():
        found |= {f"{name}/{field}": tensor for field, tensor in fields.items()}
    return checkpoint.step, found


def assert_same(recipe, other):
    step, tensors = final_state(recipe)
    other_step, others = final_state(other)
    assert step == other_step
    assert tensors.keys() == others.keys()
    different = [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
    assert not different


def options(method, schedule="flush"):
    lora = {"method": "lora", "lora_dropout": 0.1} if method == "lora" else {}
    return {"epochs": 2, "max_steps": STEPS, "schedule": schedule, "rejoin_s": 0, "rebalance": False} | lora


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, make_recipe, cluster, run):
    """Finished runs that nothing happened to, by what they train."""
    found = {}

    def finished(method):
        if method not in found:
            found[method] = make_recipe(tmp_path_factory.mktemp(method) / "run", **options(method))
            run(found[method], cluster())
        return found[method]

    return finished


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("stages", [((4, 0),), ((6, 1),), ((2, 2), (7, 1))], ids=["first", "middle", "last two"])
def test_a_flushed_run_that_loses_workers_ends_with_the_weights_of_an_undisturbed_one(
    method, stages, tmp_path, make_recipe, cluster, run, saboteur, undisturbed
):
    recipe = make_recipe(tmp_path / "run", **options(method))
    watcher = cluster()
    saboteur.at(watcher, *stages)
    result = run(recipe, watcher)
    assert_same(recipe, undisturbed(method))
    assert len(result.losses) == STEPS
    recoveries = [record for record in watcher.records if isinstance(record, RecoveryRecord)]
    assert len(recoveries) == len(stages)
    assert all(record.replayed_steps <= 1 for record in recoveries)
    assert len(result.plan.stages) == 3 - len(stages)
    lost = [record.worker for record in watcher.records if isinstance(record, MembershipRecord)]
    assert len(lost) == len(stages)
