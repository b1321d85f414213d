"""Where checkpoints are kept, which one is the latest, and which are deleted."""

import logging

import pytest
import torch

from coterie.checkpoint.manifest import NewerFormatError
from coterie.checkpoint.store import CheckpointStore
from coterie.errors import CheckpointError, StorageError, UsageError
from coterie.ids import RunId


def test_an_empty_or_absent_folder_has_no_latest_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path).latest() is None
    assert CheckpointStore(tmp_path / "none").latest() is None
    assert not (tmp_path / "none").exists()


def test_what_was_committed_is_what_another_process_would_read(tmp_path, tiny):
    tiny.save(CheckpointStore(tmp_path), 120)
    latest = CheckpointStore(tmp_path).latest()
    tiny.assert_equal(latest, 120)
    assert latest.folder == tmp_path / "step-000120"
    assert latest.units == (0, 1, 2, 3)
    assert latest.manifest.terms == tiny.terms
    assert latest.manifest.loss_tail == (2.5, 0.1)
    assert latest.manifest.shards[1].parameters == ("block.0.weight", "block.0.bias")


def test_the_newest_two_stay_and_older_ones_go(tmp_path, tiny, names_in):
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30, 40):
        tiny.save(store, step)
    assert names_in(tmp_path) == ["step-000030", "step-000040"]


def test_as_many_stay_as_asked(tmp_path, tiny):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (10, 20, 30, 1_000_000):
        tiny.save(store, step)
    assert store.steps() == (20, 30, 1_000_000)


def test_keeping_a_single_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match="1 checkpoint"):
        CheckpointStore(tmp_path, keep=1)


def test_a_second_checkpoint_of_the_same_step_takes_the_place_of_the_first(tmp_path, tiny, names_in):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    with store.begin(10, {0: {"x": (2,)}}) as writer:
        writer.write_unit(0, {"x": torch.ones(2)}, {})
        writer.commit(tiny.manifest(10))
    assert names_in(tmp_path) == ["step-000010"]
    assert store.latest().read_unit(0)[0]["x"].tolist() == [1, 1]


def test_a_checkpoint_without_all_units_cannot_be_committed(tmp_path, tiny, names_in):
    store = CheckpointStore(tmp_path)
    with store.begin(5, tiny.shapes) as writer:
        writer.write_unit(1, *tiny.state(5, 1))
        assert writer.missing_units == (0, 2, 3)
        with pytest.raises(CheckpointError, match=r"lacks units \[0, 2, 3\]"):
            writer.commit(tiny.manifest(5))
    assert names_in(tmp_path) == []


def test_a_manifest_of_another_step_cannot_be_committed(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="step 6"), CheckpointStore(tmp_path).begin(5, {}) as writer:
        writer.commit(tiny.manifest(6))


def test_a_writer_is_used_once(tmp_path, tiny):
    store = CheckpointStore(tmp_path)
    writer = store.begin(5, {})
    writer.commit(tiny.manifest(5))
    with pytest.raises(CheckpointError, match="committed or given up"):
        writer.commit(tiny.manifest(5))
    with pytest.raises(CheckpointError, match="committed or given up"):
        writer.write_unit(0, {}, {})


def test_leaving_the_block_without_a_commit_deletes_what_was_written(tmp_path, tiny, names_in):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    with store.begin(20, tiny.shapes) as writer:
        writer.write_unit(0, *tiny.state(20, 0))
    assert names_in(tmp_path) == ["step-000010"]


def test_leftovers_of_a_crash_are_invisible_and_go_at_the_next_begin(tmp_path, tiny, names_in):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    for name in ("step-000020.partial", "step-000005.removing", "step-000004.replaced.removing", "mine.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "unit-000.safetensors").write_bytes(b"half")
    assert store.latest().step == 10
    assert "step-000020.partial" in names_in(tmp_path)  # reading deletes nothing: a writer may be at work
    store.begin(30, {}).abort()
    assert names_in(tmp_path) == ["mine.partial", "step-000010"]


def test_a_replaced_checkpoint_whose_successor_never_came_is_found_and_gets_its_name_back(tmp_path, tiny, names_in):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    (tmp_path / "step-000010").rename(tmp_path / "step-000010.replaced")
    tiny.assert_equal(store.latest(), 10)
    assert names_in(tmp_path) == ["step-000010.replaced"]
    store.begin(20, {}).abort()
    assert names_in(tmp_path) == ["step-000010"]


@pytest.mark.parametrize("file", ["unit-000.safetensors", "unit-002.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "grow"])
def test_a_damaged_checkpoint_is_skipped_with_a_note(tmp_path, tiny, caplog, file, harm):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    tiny.save(store, 20)
    path = tmp_path / "step-000020" / file
    data = bytearray(path.read_bytes())
    match harm:
        case "flip":
            data[len(data) * 2 // 3] ^= 1
            path.write_bytes(data)
        case "truncate":
            path.write_bytes(data[:-1])
        case "grow":
            path.write_bytes(data + b"}")
        case "delete":
            path.unlink()
    with caplog.at_level(logging.WARNING):
        tiny.assert_equal(store.latest(), 10)
    assert list(store.damage) == [20]
    assert "step 20" in caplog.text
    assert file in store.damage[20] or "manifest" in store.damage[20]


def test_every_single_flipped_byte_of_the_manifest_is_noticed_or_harmless(tmp_path, tiny):
    store = CheckpointStore(tmp_path)
    manifest = tiny.save(store, 10).manifest
    path = tmp_path / "step-000010" / "manifest.json"
    data = path.read_bytes()
    harmless = 0
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x04
        path.write_bytes(flipped)
        try:
            assert store.open(10, verify=False).manifest == manifest
            harmless += 1
        except CheckpointError:
            pass
    assert harmless == 0


def test_a_renamed_copy_does_not_pass_for_a_later_step(tmp_path, tiny):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    tiny.save(store, 20)
    (tmp_path / "step-000010").rename(tmp_path / "step-000090")
    assert store.latest().step == 20
    assert "renamed" in store.damage[90]


def test_when_every_checkpoint_is_damaged_that_is_an_error_and_not_a_fresh_start(tmp_path, tiny):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    (tmp_path / "step-000010" / "unit-000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"damaged.*unit-000"):
        store.latest()


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(tmp_path, tiny):
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        tiny.save(store, step)
    path = tmp_path / "step-000030" / "unit-000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert store.latest().step == 20
    tiny.save(store, 25)  # the run went on from 20
    assert store.steps() == (20, 25)
    assert store.latest().step == 25


def test_checkpoints_of_another_run_are_refused_and_not_deleted(tmp_path, tiny):
    for step in (10, 20):
        tiny.save(CheckpointStore(tmp_path, run_id=RunId("run-a")), step)
    other = CheckpointStore(tmp_path, run_id=RunId("run-b"))
    with pytest.raises(CheckpointError, match=r"run run-a, not of run run-b"):
        other.latest()
    with pytest.raises(CheckpointError, match=r"run run-a, not of run run-b"):
        other.begin(30, tiny.shapes)
    assert other.steps() == (10, 20)


def test_a_newer_format_is_refused_naming_both_versions_and_not_skipped(tmp_path, tiny, write_newer_manifest):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    tiny.save(store, 20)
    write_newer_manifest(tmp_path / "step-000020" / "manifest.json")
    with pytest.raises(NewerFormatError, match=r"format version 99.*version 1"):
        store.latest()
    with pytest.raises(NewerFormatError, match=r"format version 99.*version 1"):
        store.begin(30, tiny.shapes)
    assert store.steps() == (10, 20)


def test_too_little_room_is_said_before_anything_is_written(tmp_path, tiny, names_in):
    store = CheckpointStore(tmp_path)
    tiny.save(store, 10)
    with pytest.raises(StorageError, match=r"not enough room .*1024 GiB needed, .* free") as caught:
        store.begin(20, tiny.shapes, needed_bytes=1024 * 1024**3)
    assert "untouched" in caught.value.hint
    assert names_in(tmp_path) == ["step-000010"]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path, tiny):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="could not write"):
        CheckpointStore(tmp_path / "file").begin(1, tiny.shapes)
