"""Devices that are lost in mid-run: training goes on, and ends with the weights of a run that nothing happened to."""

import math
import os
import subprocess
import sys

import psutil
import pytest
import torch

from coterie.api import training
from coterie.checkpoint.names import checkpoint_folder, replica_folder, saved_steps
from coterie.checkpoint.store import CheckpointStore
from coterie.cluster.fault_messages import Leaving
from coterie.cluster.messages import Goodbye, control
from coterie.coordinator import stages
from coterie.coordinator.run import TrainingRun
from coterie.errors import WorkerLostError
from coterie.local import JOIN_LINK_VARIABLE
from coterie.metrics.fault_records import MembershipRecord, RecoveryRecord
from coterie.metrics.records import FaultRecord, PlanRecord, StepRecord
from coterie.planner import make_plan
from coterie.worker import seating
from coterie.worker.settings import WorkerSettings

STEPS = 12
TRAIN_STEPS_OF_AN_EPOCH = 9


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


def units_of_worker(stages, worker):
    """The units of a worker's stage; none if it has no stage."""
    return {unit for one in stages if one.worker == worker for unit in range(one.first_unit, one.stop_unit)}


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
    handed_out = saboteur.runs[0].session.handed_out
    assert handed_out.keys() == {stage.worker for stage in result.plan.stages}
    before = [record for record in watcher.records if isinstance(record, PlanRecord)][-2]
    frozen = {0} if method == "lora" else set()  # embeddings have no adapters
    for stage in result.plan.stages:
        own = units_of_worker(before.stages, stage.worker) & units_of_worker(result.plan.stages, stage.worker)
        assert own - frozen <= handed_out[stage.worker].trained, "what a worker has trained itself need not come back"
    assert recoveries[-1].sent_bytes == sum(one.sent_bytes for one in handed_out.values())
    assert recoveries[-1].kept_bytes > 0
    lost = [record.worker for record in watcher.records if isinstance(record, MembershipRecord)]
    assert len(lost) == len(stages)


def test_stages_that_end_with_their_links_to_a_lost_worker_are_no_losses_of_their_own(
    tmp_path, make_recipe, cluster, run, saboteur, undisturbed, monkeypatch, wait_until
):
    """A plan that takes long to make: meanwhile the neighbours of whoever was lost give up to wait for it."""
    requests = []

    def late(request):
        requests.append(request)
        if len(requests) == 1:
            wait_until(lambda: len(saboteur.runs[-1].session.members.losses) == 2, "both neighbours' word")
        return make_plan(request)

    monkeypatch.setattr(seating, "NEWS_S", 0.0)
    monkeypatch.setattr(stages, "make_plan", late)
    recipe = make_recipe(tmp_path / "run", **options("lora"))
    watcher = cluster()
    saboteur.at(watcher, (4, 1))
    result = run(recipe, watcher)
    assert [recovery.plan_version for recovery in result.summary.recoveries] == [2]
    assert len(requests) == 1
    assert_same(recipe, undisturbed("lora"))


def test_a_run_without_a_flush_goes_on_too(tmp_path, make_recipe, cluster, run, saboteur):
    recipe = make_recipe(tmp_path / "run", **options("lora", "stash"))
    watcher = cluster()
    saboteur.at(watcher, (4, 1))
    result = run(recipe, watcher)
    assert len(result.losses) == STEPS
    assert all(math.isfinite(loss) for loss in result.losses)
    (recovery,) = (record for record in watcher.records if isinstance(record, RecoveryRecord))
    assert recovery.plan_version == 2
    assert result.summary.recoveries == (recovery,)
    assert len(result.summary.devices) == 3, "the one that was lost has worked, too"


def test_a_worker_that_is_lost_while_it_is_measured_costs_the_run_one_device(
    tmp_path, make_recipe, cluster, run, saboteur, undisturbed
):
    recipe = make_recipe(tmp_path / "run", **options("lora") | {"min_workers": 2})

    class Cutting(cluster):
        def notice(self, text):
            super().notice(text)
            if text.startswith("measuring device-b"):
                members = saboteur.runs[-1].session.members
                next(member for member in members.by_id.values() if member.hello.name == "device-b").link.abort()

    watcher = Cutting()
    result = run(recipe, watcher)
    assert any(text.startswith("device-b was lost before the run began") for text in watcher.notices)
    assert {stage.device_name for stage in result.plan.stages} == {"device-a", "device-c"}
    assert result.summary.recoveries == ()
    assert_same(recipe, undisturbed("lora"))


def test_a_worker_that_wants_to_leave_where_the_pipeline_is_not_empty_is_let_go_before_it_is(
    tmp_path, make_recipe, cluster, run, saboteur
):
    recipe = make_recipe(tmp_path / "run", **options("lora", "stash"))
    watcher, asked = cluster(), []

    def wish(record):
        if isinstance(record, StepRecord) and record.step == 4 and not asked:
            members = saboteur.runs[-1].session.members
            asked.append(record.workers[1].worker)
            members.on_wish(members.by_id[asked[0]], Leaving(reason="its owner needs it"))

    watcher.on_record = wish
    result = run(recipe, watcher)
    changes = [record for record in watcher.records if isinstance(record, MembershipRecord)]
    assert [(record.worker, record.change, record.reason) for record in changes] == [
        (asked[0], "left", "its owner needs it")
    ]
    assert changes[0].step < TRAIN_STEPS_OF_AN_EPOCH, "not where the next segment begins"
    (moved,) = result.summary.rebalances
    assert (moved.cause, moved.plan_version) == ("leaving", 2)
    assert result.summary.recoveries == ()
    assert asked[0] not in [stage.worker for stage in result.plan.stages]
    assert len(result.losses) == STEPS
    assert all(math.isfinite(loss) for loss in result.losses)
    assert watcher.failures == {}


def test_a_worker_that_goes_without_waiting_to_be_released_has_left_and_is_not_lost(
    tmp_path, make_recipe, cluster, run, saboteur, undisturbed
):
    recipe = make_recipe(tmp_path / "run", **options("lora"))
    watcher, gone = cluster(), []

    def goodbye(record):
        if isinstance(record, StepRecord) and record.step == 4 and not gone:
            members = saboteur.runs[-1].session.members
            member = members.by_id[record.workers[1].worker]
            gone.append(member.worker)
            frame = control(Goodbye(reason="its battery is down to 5 %"), source=member.worker)
            members._take(member, frame)

    watcher.on_record = goodbye
    result = run(recipe, watcher)
    assert_same(recipe, undisturbed("lora"))
    (recovery,) = result.summary.recoveries
    assert recovery.line.startswith(f"{recovery.device_name} left at step 5 (its battery is down to 5 %)")
    (change,) = (record for record in watcher.records if isinstance(record, MembershipRecord))
    assert change.change == "left"
    assert not any(isinstance(record, FaultRecord) for record in watcher.records)


def test_a_run_whose_last_worker_is_lost_waits_for_it_to_come_back(
    tmp_path, make_recipe, cluster, run, saboteur, undisturbed
):
    recipe = make_recipe(tmp_path / "run", **options("lora") | {"rejoin_s": 120, "workers": 1, "min_workers": 1})
    watcher = cluster(WorkerSettings(name="only"))
    saboteur.at(watcher, (4, 0))
    run(recipe, watcher)
    assert_same(recipe, undisturbed("lora"))
    changes = [(record.change, record.step) for record in watcher.records if isinstance(record, MembershipRecord)]
    assert [change for change, _ in changes] == ["lost", "returned"]
    assert any("waits 120 s for one to join: no worker is left" in notice for notice in watcher.notices)


def test_a_run_that_nobody_comes_back_to_ends_and_says_how_to_go_on(
    tmp_path, make_recipe, cluster, run, saboteur, changed, undisturbed
):
    recipe = make_recipe(tmp_path / "run", **options("lora") | {"workers": 1, "min_workers": 1})
    watcher = cluster(WorkerSettings(name="only"))
    saboteur.at(watcher, (4, 0))
    with pytest.raises(WorkerLostError, match=r"only is gone: .*; no worker is left") as caught:
        run(recipe, watcher)
    assert "the state after step 5 of 12 is kept: continue with --resume" in caught.value.hint
    run(changed(recipe, "run", resume=True), cluster())
    assert_same(recipe, undisturbed("lora"))


STUCK_WORKER = f"""
import asyncio, os, threading
from coterie.pipeline import executor
from coterie.transport.join_link import JoinLink
from coterie.worker import stall
from coterie.worker.program import run_worker
from coterie.worker.settings import WorkerSettings
norms, counted = executor.unit_squared_norms, []
def hang_in_the_fifth_step(*arguments, **options):
    counted.append(1)
    if len(counted) == 5:
        threading.Event().wait()
    return norms(*arguments, **options)
executor.unit_squared_norms = hang_in_the_fifth_step
stall.LEAST_S, stall.TIMES = 2.0, 0
asyncio.run(run_worker(JoinLink.from_text(os.environ["{JOIN_LINK_VARIABLE}"]), WorkerSettings(name="stuck"), print))
"""


def test_a_worker_that_gives_signs_of_life_and_computes_no_more_is_done_without(
    tmp_path, make_recipe, cluster, run, undisturbed
):
    class WithOneStuck(cluster):
        def start(self, settings):
            if settings.name != "stuck":
                super().start(settings)
                return
            environment = {**os.environ, JOIN_LINK_VARIABLE: self.join_link}
            words = [sys.executable, "-c", STUCK_WORKER]
            self.process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)

    recipe = make_recipe(tmp_path / "run", **options("lora"), workers=2, min_workers=1)
    watcher = WithOneStuck(WorkerSettings(name="well"), WorkerSettings(name="stuck"))
    try:
        result = run(recipe, watcher)
    finally:
        watcher.process.kill()
        watcher.process.wait()
    assert_same(recipe, undisturbed("lora"))
    (recovery,) = (record for record in watcher.records if isinstance(record, RecoveryRecord))
    assert recovery.device_name == "stuck"
    assert "has not come back from one micro-batch" in recovery.reason
    assert len(result.plan.stages) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_worker_and_then_a_killed_coordinator_cost_nothing(
    tmp_path, commands, make_recipe, cluster, run, wait_until, recorded, children_of, changed, model, data
):
    total = {"epochs": 20, "max_steps": 120, "method": "lora", "lora_dropout": 0.1, "rejoin_s": 0, "rebalance": False}
    recipe = make_recipe(tmp_path / "run", **total)
    words = ["--batch-rows", 4, "--micro-batches", 2, "--learning-rate", 5e-3, "--min-workers", 3, "--no-rebalance"]
    for name, value in total.items():
        words += [] if name == "rebalance" else [f"--{name.replace('_', '-')}", value]
    for name in ("left", "middle", "right"):
        words += ["--local-worker", f"name={name},speed=0.1"]  # the run must still be under way when it is killed
    output = tmp_path / "run"
    command = commands("train", "--model", model, "--train", data, "--output", output, *words)
    wait_until(lambda: len(recorded(output, "step")) > 3, "training", command, timeout_s=400)
    psutil.Process(children_of(command.process.pid)["middle"]).kill()
    wait_until(lambda: recorded(output, "recovery"), "recovery", command)
    (recovery,) = recorded(output, "recovery")
    assert recovery["device_name"] == "middle"
    assert recovery["replayed_steps"] <= 1
    assert recovery["kept_bytes"] > 0
    steps = len(recorded(output, "step"))
    wait_until(lambda: max(saved_steps(replica_folder(output)), default=0) > steps, "a replica on disk", command)
    out, _ = command.kill()
    assert "the local worker middle was killed by signal 9" in out
    assert "training went on after" in out
    result = run(changed(recipe, "run", resume=True), cluster())
    assert result.summary.first_step > steps
    assert result.summary.first_step + result.summary.steps == 120
    assert not replica_folder(output).exists(), "the run is finished"
    whole = make_recipe(tmp_path / "undisturbed", **total)
    run(whole, cluster())
    assert_same(recipe, whole)
