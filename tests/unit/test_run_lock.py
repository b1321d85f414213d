"""One run per folder."""

import subprocess
import sys

import pytest

from coterie.api.run_lock import hold_door, hold_folder
from coterie.config.cluster_section import ClusterSection
from coterie.errors import StorageError, UsageError

HOLD = """
import sys
from pathlib import Path
from coterie.api.run_lock import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_run_in_the_same_folder_is_refused_and_a_killed_one_leaves_it_free(tmp_path):
    with holder(tmp_path) as process:
        with pytest.raises(UsageError, match="another run is using"), hold_folder(tmp_path):
            pass
        process.kill()
        process.wait()
    with hold_folder(tmp_path):
        pass


def test_folders_are_held_apart(tmp_path):
    with hold_folder(tmp_path / "a"), hold_folder(tmp_path / "b"):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"), hold_folder(tmp_path / "file" / "run"):
        pass


def test_a_folder_in_which_nothing_was_written_is_taken_away_again_if_it_is_new(tmp_path):
    (tmp_path / "old").mkdir()
    with hold_folder(tmp_path / "old"), hold_folder(tmp_path / "new"), hold_folder(tmp_path / "used"):
        (tmp_path / "used" / "recipe.toml").write_text("")
    assert [(tmp_path / name).exists() for name in ("old", "new", "used")] == [True, False, True]


def test_the_standing_link_is_one_runs_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CONFIG", str(tmp_path / "settings"))
    standing, plain = ClusterSection(standing_link=True), ClusterSection()
    with hold_door(standing):
        with pytest.raises(UsageError, match="another run of yours uses the standing link"), hold_door(standing):
            pass
        with hold_door(plain):
            pass
    with hold_door(standing):
        pass
