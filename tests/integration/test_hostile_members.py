"""Members of a run that break its rules: they are heard no more, the run goes on, and its weights are the same."""

import pytest
import torch
from safetensors.torch import load_file

from coterie.api import training
from coterie.cluster.fault_messages import REPLICA, Replicated
from coterie.cluster.messages import (
    CONTROL,
    HIDDEN,
    Heartbeat,
    MicroBatchDone,
    NormPart,
    UnitBody,
    control,
    pack,
)
from coterie.coordinator.run import TrainingRun
from coterie.metrics.records import MembershipRecord, StepRecord
from coterie.tensors.codecs import encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.worker.settings import WorkerSettings

LATER = 1 << 30


def header(kind, **fields):
    return Frame(FrameHeader(kind=kind, **fields))


def tensors(kind, named, **fields):
    parts = [encode(tensor, name, "raw") for name, tensor in named.items()]
    specs = tuple(spec for spec, _ in parts)
    return Frame(FrameHeader(kind=kind, tensors=specs, **fields), [buffer for _, buffer in parts])


# What a member sends: (its words, who it is, who comes after it, the plan's version) to frames.


def its_report_twice(step, _me, _other, version):
    return [control(NormPart(step=step, squares=()), plan_version=version)] * 2


def reports_of_an_old_plan(step, _me, _other, version):
    return [
        control(Replicated(step=LATER), plan_version=version - 1),
        control(MicroBatchDone(step=step, micro_batch=0, loss_sum=1e9, loss_tokens=1), plan_version=version - 1),
        header(REPLICA, plan_version=version - 1, step=LATER, body=pack(UnitBody(unit=0))),
    ]


def a_flood_of_heartbeats(_step, _me, _other, _version):
    return [control(Heartbeat(rss_bytes=number)) for number in range(3000)]


def tensors_that_nobody_waits_for(_step, me, other, version):
    return [tensors(HIDDEN, {"hidden": torch.ones(2)}, source=me, target=other, plan_version=version - 1)] * 50


HARMLESS = (its_report_twice, reports_of_an_old_plan, a_flood_of_heartbeats, tensors_that_nobody_waits_for)


def a_pickle(_step, _me, _other, version):
    return [header(CONTROL, body=b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00.", plan_version=version)]


def words_of_somebody_else(_step, me, other, version):
    return [tensors(HIDDEN, {"hidden": torch.ones(2)}, source=other, target=me, plan_version=version)]


def a_loss_that_it_cannot_know(_step, _me, _other, version):
    return [control(MicroBatchDone(step=LATER, micro_batch=0, loss_sum=0.0, loss_tokens=1), plan_version=version)]


def weights_of_another_stage(step, _me, _other, version):
    named = {"param/classifier.bias": torch.zeros(7)}
    fields = {"plan_version": version, "step": step}
    return [tensors(REPLICA, named, body=pack(UnitBody(unit=unit)), **fields) for unit in range(7)]


def a_flood_of_steps_to_come(_step, _me, _other, version):
    return [control(NormPart(step=LATER + number, squares=()), plan_version=version) for number in range(3000)]


EXPELLED = (
    a_pickle,
    words_of_somebody_else,
    a_loss_that_it_cannot_know,
    weights_of_another_stage,
    a_flood_of_steps_to_come,
)
# The first two plans differ by the loss of whoever sends a pickle: only then is there an old one.
MISDEEDS = (EXPELLED[0], *HARMLESS, *EXPELLED[1:])
# Whoever is sent away does not come back: how many steps that takes depends on the machine. One is left for the end.
WORKERS = tuple(WorkerSettings(name=f"device-{number}") for number in range(len(EXPELLED) + 1))
GAP = 2
"""Steps between two misdeeds at least, so that training goes on after each."""
STEPS = GAP * (len(MISDEEDS) + 2)


class Misdeeds:
    """Puts frames on the link of a member with a stage as if they had come from there, one misdeed every few steps."""

    def __init__(self, monkeypatch):
        self.runs = []
        self.done = []
        self.next_step = GAP
        misdeeds = self

        class Watched(TrainingRun):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                misdeeds.runs.append(self)

        monkeypatch.setattr(training, "TrainingRun", Watched)

    def watch(self, record):
        if not isinstance(record, StepRecord) or record.step < self.next_step or len(self.done) == len(MISDEEDS):
            return
        members = self.runs[-1].session.members
        me, other = [worker.worker for worker in record.workers][-2:]
        self.next_step = record.step + GAP
        misdeed = MISDEEDS[len(self.done)]
        self.done.append(misdeed.__name__)
        link = members.by_id[me].link
        for frame in misdeed(record.step, me, other, members.plan_version):
            link._deliver(frame)


def options(workers):
    plain = {"workers": len(workers), "min_workers": 2, "rejoin_s": 0, "rebalance": False, "method": "lora"}
    return plain | {"epochs": 3, "max_steps": STEPS}


def adapters(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, make_recipe, cluster, run):
    recipe = make_recipe(tmp_path_factory.mktemp("undisturbed") / "run", **options(WORKERS[:2]))
    return run(recipe, cluster(*WORKERS[:2]))


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory, make_recipe, cluster, run):
    with pytest.MonkeyPatch.context() as patch:
        misdeeds, watcher = Misdeeds(patch), cluster(*WORKERS)
        watcher.on_record = misdeeds.watch
        recipe = make_recipe(tmp_path_factory.mktemp("disturbed") / "run", **options(WORKERS))
        result = run(recipe, watcher)
    return result, watcher, misdeeds


def test_every_misdeed_was_done_and_the_run_went_on_to_its_end(disturbed):
    result, _, misdeeds = disturbed
    assert misdeeds.done == [misdeed.__name__ for misdeed in MISDEEDS]
    assert len(result.losses) == STEPS


def test_losses_and_weights_are_those_of_a_run_in_which_all_were_honest(disturbed, undisturbed):
    result, *_ = disturbed
    assert result.losses == undisturbed.losses
    trained, others = adapters(result.model_folder), adapters(undisturbed.model_folder)
    assert trained.keys() == others.keys()
    assert [name for name, tensor in trained.items() if not torch.equal(tensor, others[name])] == []


def test_who_breaks_the_rules_is_sent_away_and_who_only_repeats_itself_is_not(disturbed):
    result, watcher, _ = disturbed
    lost = [record for record in watcher.records if isinstance(record, MembershipRecord) and record.change == "lost"]
    reasons = [record.reason for record in lost]
    assert len(reasons) == len(EXPELLED), reasons
    words = ("not decode", "not passed on", "which only the last stage knows", "its stage holds", "nobody has asked")
    assert [reason for reason, said in zip(reasons, words, strict=True) if said not in reason] == []
    assert [record.worker for record in result.summary.recoveries] == [record.worker for record in lost]
