"""The last replica on disk."""

import asyncio

import pytest
import torch

from coterie.checkpoint.manifest import Manifest
from coterie.checkpoint.store import CheckpointStore
from coterie.clock import FakeClock
from coterie.coordinator.replica_folder import ReplicaFolder
from coterie.coordinator.replicas import Replica
from coterie.coordinator.saving import run_terms
from coterie.ids import RunId

UNITS = {1: {"a": (2,)}}


def replica(step):
    return Replica(step, {1: {"param/a": torch.full((2,), float(step)), "optim/a/step": torch.tensor(float(step))}})


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "replica", run_id=RunId("run"))


@pytest.fixture
def folder(store, job):
    told = []

    def manifest(step):
        return Manifest(terms=run_terms(job, 2), global_step=step, epoch=0, data_position=step, samples_seen=4 * step)

    made = ReplicaFolder(store, UNITS, manifest, FakeClock(), told.append)
    made.told = told
    return made


def test_the_newest_replica_is_whole_on_disk_when_the_run_ends(folder, store):
    async def work():
        for step in (1, 2, 3):
            folder.offer(replica(step))
        await folder.close()

    asyncio.run(work())
    newest = store.latest()
    assert newest.step == 3
    parameters, state = newest.read(["a"])
    assert parameters["a"].tolist() == [3.0, 3.0]
    assert state["a"]["step"].item() == 3.0
    assert folder.told == []


def test_what_a_checkpoint_holds_is_not_written_again(folder, store):
    async def work():
        folder.superseded(4)
        folder.offer(replica(4))
        folder.superseded(4)
        await folder.close()

    asyncio.run(work())
    assert store.steps() == ()


def test_a_disk_that_takes_nothing_is_told_of_once_and_ends_nothing(folder, store):
    store.folder.write_text("in the way")

    async def work():
        folder.offer(replica(1))
        await folder.close()
        folder.offer(replica(2))
        await folder.close()

    asyncio.run(work())
    assert len(folder.told) == 1
    assert "in memory only" in folder.told[0]


def test_nothing_is_left_of_a_run_that_is_finished(folder, store):
    async def work():
        folder.offer(replica(1))
        await folder.close()
        folder.remove()

    asyncio.run(work())
    assert not store.folder.exists()
