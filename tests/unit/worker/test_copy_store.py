"""Copies of trained state: what is kept and dropped, where, and that a wrong one is never used."""

import errno
import os
import stat
from contextlib import contextmanager

import pytest
import torch

from coterie.checkpoint.shard_file import state_digest
from coterie.worker import copy_store
from coterie.worker.copy_store import CopyFolder, CopyStore

NBYTES = 16
PLENTY = 1 << 20


def state(value):
    return {"param/a": torch.full((2, 1), float(value)), "optim/a/exp_avg": torch.tensor([1.0, float(value)])}


def make(folder=None, **options):
    store = CopyStore(CopyFolder(folder), **options)
    store.begin(0, PLENTY)
    return store


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("in_memory_bytes", [PLENTY, 0], ids=["in memory", "on disk"])
def test_what_is_kept_is_found_by_its_digest_and_what_is_found_is_nobody_elses(tmp_path, in_memory_bytes):
    store = make(tmp_path, in_memory_bytes=in_memory_bytes)
    store.put(3, 1, state(5))
    assert bool(files(tmp_path)) == (in_memory_bytes == 0)
    digest = state_digest(state(5))
    for _ in range(2):
        found = store.find(3, 1, digest)
        assert found.keys() == state(5).keys()
        assert all(torch.equal(tensor, state(5)[name]) for name, tensor in found.items())
        for tensor in found.values():
            tensor.zero_()  # as training would
    assert store.find(3, 2, digest) is None
    assert store.find(2, 1, digest) is None


@pytest.mark.parametrize("other", [state(6), {"param/a": state(5)["param/a"]}, {"param/b": state(5)["param/a"]}])
def test_a_copy_of_another_state_is_not_used_and_goes(other):
    store = make()
    store.put(3, 1, other)
    assert store.find(3, 1, state_digest(state(5))) is None
    assert store.places == set()


def test_a_damaged_file_is_not_used(tmp_path):
    store = make(tmp_path, in_memory_bytes=0)
    store.put(3, 1, state(5))
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    assert store.find(3, 1, state_digest(state(5))) is None
    assert not files(tmp_path)


@pytest.mark.parametrize("in_memory_bytes", [PLENTY, 0], ids=["in memory", "on disk"])
def test_a_commit_drops_what_is_older_and_nothing_older_comes_in_again(tmp_path, in_memory_bytes):
    store = make(tmp_path, in_memory_bytes=in_memory_bytes)
    for step in (1, 2, 3):
        store.put(step, 0, state(step))
    store.committed(2)
    store.put(1, 0, state(1))
    assert not store.lacks(1, 0)
    assert store.places == {(2, 0), (3, 0)}
    assert len(files(tmp_path)) == (2 if in_memory_bytes == 0 else 0)


def test_a_plan_that_begins_again_at_a_step_drops_what_the_plan_before_did_after_it():
    store = make()
    for step in (2, 3, 4):
        store.put(step, 0, state(step))
    store.begin(3, PLENTY)
    assert store.places == {(3, 0)}
    store.put(4, 0, state(7))
    assert store.find(4, 0, state_digest(state(7))) is not None


def test_where_there_is_no_room_the_oldest_step_goes_and_never_a_newer_one():
    store = make()
    store.begin(0, 3 * NBYTES)
    for step, unit in ((1, 0), (1, 1), (2, 0), (2, 1)):
        store.put(step, unit, state(step))
    assert store.places == {(2, 0), (2, 1)}
    store.put(3, 0, state(3))
    store.put(1, 0, state(1))
    assert store.places == {(2, 0), (2, 1), (3, 0)}
    store.put(4, 0, {"param/a": torch.zeros(100)})
    assert store.places == {(2, 0), (2, 1), (3, 0)}


def test_tensors_that_will_change_are_written_down_and_never_kept_as_they_are(tmp_path):
    live = state(5)
    store = make(tmp_path)
    store.put(1, 0, live, are_own=False)
    live["param/a"].zero_()
    assert store.find(1, 0, state_digest(state(5))) is not None
    without = make()
    without.put(1, 0, state(5), are_own=False)
    assert without.places == set()


def test_a_disk_that_cannot_be_written_or_is_full_keeps_nothing_and_ends_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    store = make(tmp_path / "file" / "folder", in_memory_bytes=0)
    store.put(1, 0, state(1))
    assert store.places == set()
    monkeypatch.setattr(copy_store, "LEFT_FREE_BYTES", 1 << 60)
    store = make(tmp_path, in_memory_bytes=0)
    store.put(1, 0, state(1))
    assert store.places == set()


def test_what_could_be_written_of_a_copy_before_the_disk_was_full_goes(tmp_path, monkeypatch):
    class Full:
        def write(self, _piece):
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def open_full(descriptor, _mode):
        os.write(descriptor, b"weights")
        os.close(descriptor)
        yield Full()

    monkeypatch.setattr(copy_store.os, "fdopen", open_full)
    store = make(tmp_path, in_memory_bytes=0)
    store.put(1, 0, state(1))
    assert store.places == set()
    assert not files(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="files have no mode there")
def test_files_are_for_their_owner_only_and_gone_at_the_end(tmp_path):
    folder = CopyFolder(tmp_path / "copies")
    path = folder.write("1-0", state(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    folder.remove()
    assert not list((tmp_path / "copies").iterdir())


def test_what_a_killed_worker_left_is_removed_by_the_next_one_and_a_living_ones_is_not(tmp_path):
    gone, lives = tmp_path / "999999999-abc", tmp_path / f"{os.getppid()}-abc"
    for folder in (gone, lives):
        folder.mkdir()
        (folder / "1-0-x").write_bytes(b"weights")
    CopyFolder(tmp_path)
    assert not gone.exists()
    assert lives.exists()


def test_what_a_killed_worker_with_this_ones_number_left_is_removed_and_a_folder_of_this_one_is_not(tmp_path):
    """In a container every worker has the same number."""
    gone, lives = tmp_path / f"{os.getpid()}-old", tmp_path / f"{os.getpid()}-new"
    for folder in (gone, lives):
        folder.mkdir()
        (folder / "1-0-x").write_bytes(b"weights")
    os.utime(gone, (1e9, 1e9))
    CopyFolder(tmp_path)
    assert not gone.exists()
    assert lives.exists()
