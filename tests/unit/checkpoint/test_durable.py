"""Folders that are whole or absent, and file system errors that carry numbers."""

import errno
import re

import pytest
from safetensors import SafetensorError

from coterie.checkpoint.durable import publish_folder, remove_folder, settle, storage_errors, sync_tree
from coterie.errors import StorageError


def folder_with(path, text):
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_said_with_what_is_needed_and_what_is_free(tmp_path, number):
    with (
        pytest.raises(StorageError, match=r"not enough room in .*: 3\.00 MiB needed, .* free"),
        storage_errors(tmp_path, 3 * 2**20),
    ):
        raise OSError(number, "no")


def test_other_refusals_name_the_folder_and_the_systems_words(tmp_path):
    with (
        pytest.raises(StorageError, match=rf"could not write in {tmp_path}/absent: Permission denied"),
        storage_errors(tmp_path / "absent", 0),
    ):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_safetensors_own_words_are_kept(tmp_path):
    with pytest.raises(StorageError, match=r"free: No space left"), storage_errors(tmp_path, 0):
        raise SafetensorError("No space left on device")


def test_a_lost_connection_is_no_storage_error(tmp_path):
    with pytest.raises(ConnectionResetError), storage_errors(tmp_path, 0):
        raise ConnectionResetError("gone")


def test_a_published_folder_takes_the_place_of_one_with_the_same_name(tmp_path):
    folder_with(tmp_path / "a", "old")
    folder_with(tmp_path / "a.replaced", "older")
    publish_folder(folder_with(tmp_path / "a.partial", "new"), tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "new"


def test_settling_restores_what_stepped_aside_and_deletes_what_is_unfinished(tmp_path):
    folder_with(tmp_path / "v1.5.replaced", "good")
    for name in ("v1.5.partial", "v1.5.removing", "v1.5.replaced.removing", "v2.partial"):
        folder_with(tmp_path / name, "bad")
    settle(tmp_path, re.compile(re.escape("v1.5")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.5", "v2.partial"]
    assert (tmp_path / "v1.5" / "file").read_text() == "good"


def test_removing_what_is_not_there_does_nothing(tmp_path):
    remove_folder(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_syncing_a_tree_reaches_files_in_folders_and_changes_nothing(tmp_path):
    folder_with(tmp_path / "a", "x")
    folder_with(tmp_path / "a" / "b", "y")
    sync_tree(tmp_path)
    assert (tmp_path / "a" / "b" / "file").read_text() == "y"
