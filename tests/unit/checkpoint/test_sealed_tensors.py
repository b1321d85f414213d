"""Small files of tensors: whole, absent, or said to be damaged, whichever of their bytes is another."""

import errno

import pytest
import torch

from coterie.checkpoint import sealed_tensors
from coterie.checkpoint.sealed_tensors import DamagedError, read_sealed, write_sealed
from coterie.errors import StorageError

TENSORS = {"steps": torch.tensor(3), "weights": torch.arange(6.0).reshape(2, 3)}


def test_what_was_written_last_is_read_bit_for_bit(tmp_path):
    path = tmp_path / "new" / "state"
    for value in (1.0, torch.pi):
        write_sealed(path, TENSORS | {"more": torch.tensor(value)})
    read = read_sealed(path)
    assert read.keys() == TENSORS.keys() | {"more"}
    assert torch.equal(read["weights"], TENSORS["weights"])
    assert read["more"].item() == pytest.approx(torch.pi)
    assert [found.name for found in path.parent.iterdir()] == ["state"]


def test_no_changed_byte_goes_unnoticed(tmp_path):
    path = tmp_path / "state"
    write_sealed(path, TENSORS)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for at in range(header, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(DamagedError, match="checksum"):
            read_sealed(path)
    for damaged in (b"", b"\xff" * 40, content[:-1], content[:header]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError):
            read_sealed(path)


def test_a_full_disk_keeps_what_was_there_and_nothing_half(tmp_path, monkeypatch):
    path = tmp_path / "state"
    write_sealed(path, TENSORS)

    def fill_up(partial, data):
        partial.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sealed_tensors, "write_file", fill_up)
    with pytest.raises(StorageError, match="not enough room"):
        write_sealed(path, {"steps": torch.tensor(4)})
    assert [found.name for found in tmp_path.iterdir()] == ["state"]
    assert int(read_sealed(path)["steps"]) == 3
