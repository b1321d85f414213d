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
from coterie.coordinator import members
from coterie.coordinator.run import TrainingRun
from coterie.metrics.records import MembershipRecord, StepRecord
from coterie.tensors.codecs import encode
from coterie.transport.frame import Frame, FrameHeader
from coterie.worker.settings import WorkerSettings

WORKERS = tuple(WorkerSettings(name=f"device-{letter}") for letter in "abcd")
LATER = 1 << 30
# When whoever was sent away is back, and with which stage, depends on the machine: this is no test for CI.
# What each misdeed meets is tested in tests/unit/coordinator (test_claims, test_floods_of_members).
pytestmark = pytest.mark.slow

GAP = 2
"""Steps between two misdeeds, so that those who were sent away can be back."""


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
# Whoever was sent away must be back before the next misdeed: on a busy machine that takes many steps.
STEPS = 3 * GAP * len(MISDEEDS)


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
        workers = [worker.worker for worker in record.workers]
        members = self.runs[-1].session.members
        if len(workers) < 2 or workers[-2] not in members.by_id:
            return  # too few are back: there is nobody to speak for
        me, other = workers[-2:]
        self.next_step = record.step + GAP
        misdeed = MISDEEDS[len(self.done)]
        self.done.append(misdeed.__name__)
        link = members.by_id[me].link
        for frame in misdeed(record.step, me, other, members.plan_version):
            link._deliver(frame)


def options(**changes):
    return {"workers": 4, "min_workers": 2, "method": "lora", "epochs": 16, "max_steps": STEPS} | changes


def adapters(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, make_recipe, cluster, run):
    recipe = make_recipe(tmp_path_factory.mktemp("undisturbed") / "run", **options())
    return run(recipe, cluster(*WORKERS))


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory, make_recipe, cluster, run):
    with pytest.MonkeyPatch.context() as patch:
        misdeeds, watcher = Misdeeds(patch), cluster(*WORKERS)
        patch.setattr(members, "MOST_MISDEEDS", len(MISDEEDS) + 1)  # here one device may have to do them all
        watcher.on_record = misdeeds.watch
        result = run(make_recipe(tmp_path_factory.mktemp("disturbed") / "run", **options(rejoin_s=60)), watcher)
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
    _, watcher, _ = disturbed
    lost = [record for record in watcher.records if isinstance(record, MembershipRecord) and record.change == "lost"]
    assert len(lost) == len(EXPELLED)
    reasons = " ".join(record.reason for record in lost)
    for words in ("does not decode", "not passed on", "which nobody has asked for", "its stage holds"):
        assert words in reasons
