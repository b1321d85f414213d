"""What a worker takes from the stage beside it, which may be anybody's."""

import os
import threading

import msgspec
import pytest
import torch
from transformers import BertConfig

from coterie.cluster.fault_messages import REPLICA, CopyTerms
from coterie.cluster.messages import Assign
from coterie.ids import RunId, WorkerId
from coterie.jobs.model_spec import LoraSpec, ModelSpec
from coterie.jobs.optimizer_spec import OptimizerSpec
from coterie.models.anatomy import describe
from coterie.worker import copy_store
from coterie.worker.copy_store import CopyFolder, CopyStore
from coterie.worker.trained_copies import TrainedCopies
from coterie.worker.trained_state import unit_frame

OWN, BESIDE = WorkerId("own"), WorkerId("beside")


@pytest.fixture(scope="module")
def assign(plan_of):
    """The upper of two stages; the lower one trains adapters in its block and nothing in its embedding."""
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=23,
        max_position_embeddings=16,
        num_labels=3,
    )
    targets = tuple(f"bert.encoder.layer.{block}.attention.self.query" for block in range(2))
    spec = ModelSpec(
        config_json=config.to_json_string(),
        auto_class="AutoModelForTokenClassification",
        method="lora",
        lora=LoraSpec(rank=2, target_modules=targets),
    )
    plan = plan_of((BESIDE, 0, 2), (OWN, 2, 4))
    return Assign(
        run=RunId("run"),
        plan=plan,
        stage=1,
        spec=spec,
        optimizer=OptimizerSpec(),
        task="token-classification",
        gradient_below=True,
        tied_peer=WorkerId(""),
        replicate_every=1,
        copies=CopyTerms(sources=(BESIDE,), limit_bytes=1 << 20),
    )


@pytest.fixture
def copies(assign):
    copies = TrainedCopies(None)
    copies.begin(assign)
    return copies


def frame(assign, step, unit, tensors):
    return unit_frame(REPLICA, (BESIDE, OWN), assign, (step, unit), tensors)


def adapters(assign):
    anatomy = describe(assign.spec)
    return {f"param/{name}": torch.zeros(anatomy.shapes[name]) for name in anatomy.trainable[1]}


def test_a_units_trained_tensors_are_kept(assign, copies):
    copies.take(frame(assign, 1, 1, adapters(assign)))
    assert copies.others.places == {(1, 1)}


def test_copies_of_nothing_are_not_kept_since_no_limit_would_ever_end_them(assign, copies):
    assert not describe(assign.spec).trainable[0]
    for step in range(1, 4):
        copies.take(frame(assign, step, 0, {}))
    assert copies.others.places == set()


class SlowDisk:
    """Opens files for writing only when it is let go on."""

    def __init__(self, monkeypatch):
        self.go_on, self.asked = threading.Event(), threading.Event()
        self.fdopen = os.fdopen
        monkeypatch.setattr(copy_store.os, "fdopen", self.open)

    def open(self, descriptor, mode):
        self.asked.set()
        assert self.go_on.wait(60)
        return self.fdopen(descriptor, mode)


@pytest.fixture
def disk(monkeypatch):
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go_on.set()


@pytest.fixture
def on_disk(assign, tmp_path):
    """Copies for which there is no room in memory."""
    copies = TrainedCopies(tmp_path)
    copies.others = CopyStore(CopyFolder(tmp_path), in_memory_bytes=0)
    copies.begin(assign)
    return copies


def written(copies):
    """Whatever waited is on the disk."""
    copies._writer.submit(int).result(60)


def test_whoever_takes_a_copy_waits_for_no_disk_and_only_so_much_waits_for_it(assign, on_disk, disk, monkeypatch):
    monkeypatch.setattr("coterie.worker.trained_copies.UNWRITTEN_BYTES", 2 * on_disk_bytes(assign))
    for step in (1, 2, 3):
        on_disk.take(frame(assign, step, 1, adapters(assign)))
    assert on_disk.others.places == set()
    disk.go_on.set()
    written(on_disk)
    assert on_disk.others.places == {(1, 1), (2, 1)}
    on_disk.take(frame(assign, 4, 1, adapters(assign)))
    written(on_disk)
    assert (4, 1) in on_disk.others.places
    on_disk.clear()


def on_disk_bytes(assign):
    return sum(tensor.nbytes for tensor in adapters(assign).values())


def test_copies_that_were_not_on_the_disk_when_another_plan_began_are_not_kept(assign, on_disk, disk, tmp_path):
    for step in (1, 2):
        on_disk.take(frame(assign, step, 1, adapters(assign)))
    assert disk.asked.wait(60)
    on_disk.begin(msgspec.structs.replace(assign, resumed_step=0))
    disk.go_on.set()
    written(on_disk)
    assert on_disk.others.places == set()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    on_disk.clear()
