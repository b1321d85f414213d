"""Frozen tensors on a device's disk: found by their bytes, checked before use, bounded, and thrown away if damaged."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from coterie.cluster.shard_messages import ShardPart
from coterie.errors import ProtocolError
from coterie.units import MIB
from coterie.worker import shard_cache
from coterie.worker.shard_cache import ShardCache

SIZE = 4096


def tensor(seed: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def part_of(data: bytes, **changes) -> ShardPart:
    digest = hashlib.sha256(data).hexdigest()
    fields = {"name": "param/x", "dtype": "uint8", "shape": (len(data),), "nbytes": len(data), "digest": digest}
    return ShardPart(**(fields | changes))


def keep(cache: ShardCache, data: bytes) -> ShardPart:
    part = part_of(data)
    cache.store(part.digest, data)
    return part


def the_file(folder: Path) -> Path:
    (file,) = [path for path in folder.rglob("*") if path.is_file()]
    return file


def test_what_was_kept_is_found_by_any_worker_that_has_the_folder(tmp_path):
    part = keep(ShardCache(tmp_path, MIB), tensor(1))
    assert bytes(ShardCache(tmp_path, MIB).load(part)) == tensor(1)
    assert ShardCache(tmp_path, MIB).load(part_of(tensor(2))) is None


def test_equal_tensors_of_two_units_are_kept_once(tmp_path):
    cache = ShardCache(tmp_path, MIB)
    part = keep(cache, tensor(1))
    keep(cache, tensor(1))
    other = part_of(tensor(1), name="param/tied", dtype="float32", shape=(SIZE // 4,))
    assert bytes(cache.load(other)) == bytes(cache.load(part))
    assert the_file(tmp_path).stat().st_size == SIZE


@pytest.mark.parametrize("damage", [b"", tensor(1)[:-1], tensor(1)[:-1] + b"?", tensor(1) + b"?", tensor(2)])
def test_a_damaged_file_is_thrown_away_and_can_be_kept_anew(tmp_path, damage):
    cache = ShardCache(tmp_path, MIB)
    part = keep(cache, tensor(1))
    the_file(tmp_path).write_bytes(damage)
    assert cache.load(part) is None
    keep(cache, tensor(1))
    assert bytes(cache.load(part)) == tensor(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "../../etc/passwd"},
        {"digest": "A" * 64},
        {"digest": ""},
        {"nbytes": SIZE + 1},
        {"shape": (-1,)},
        {"dtype": "object"},
        {"shape": (1 << 62,), "nbytes": 1 << 62},
    ],
    ids=["path", "upper case", "empty", "size", "shape", "dtype", "huge"],
)
def test_a_part_that_contradicts_itself_is_refused_before_a_file_is_looked_for(tmp_path, changes):
    with pytest.raises(ProtocolError):
        ShardCache(tmp_path, MIB).load(part_of(tensor(1), **changes))


def test_what_was_used_longest_ago_makes_room(tmp_path):
    cache = ShardCache(tmp_path, 3 * SIZE)
    parts = [keep(cache, tensor(seed)) for seed in range(3)]
    for age, part in zip((10, 30, 20), parts, strict=True):
        path = tmp_path / part.digest[:2] / part.digest
        os.utime(path, (1_000_000_000 - age, 1_000_000_000 - age))
    assert cache.load(parts[1]) is not None  # used just now: the oldest no longer
    newest = keep(cache, tensor(9))
    assert [cache.load(part) is not None for part in (*parts, newest)] == [True, True, False, True]


def test_a_tensor_larger_than_the_quota_is_not_kept_and_nothing_makes_room_in_vain(tmp_path):
    cache = ShardCache(tmp_path, SIZE)
    assert cache.load(keep(cache, tensor(1, 2 * SIZE))) is None
    small = keep(cache, tensor(2))
    assert cache.load(keep(cache, tensor(1, 2 * SIZE))) is None
    assert cache.load(small) is not None


def test_a_disk_that_is_nearly_full_is_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache, "LEFT_FREE_BYTES", 1 << 62)
    cache = ShardCache(tmp_path, MIB)
    assert cache.load(keep(cache, tensor(1))) is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_cache(tmp_path):
    (tmp_path / "file").write_text("")
    cache = ShardCache(tmp_path / "file", MIB)
    assert cache.load(keep(cache, tensor(1))) is None
