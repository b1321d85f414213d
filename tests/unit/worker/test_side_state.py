"""A server's state on its disk: the newest whole one, whatever came after it."""

import pytest
import torch

from coterie.errors import CheckpointError
from coterie.ids import RunId
from coterie.worker.side_state import STATE_FILE, SideState


def test_what_was_saved_last_is_read_bit_for_bit(tmp_path):
    state = SideState(tmp_path, RunId("one"))
    assert state.read() is None
    for value in (1.0, torch.pi):
        state.save({"steps": torch.tensor(3), "weights": torch.full((2, 3), value)})
    read = SideState(tmp_path, RunId("one")).read()
    assert torch.equal(read["weights"], torch.full((2, 3), torch.pi))
    assert SideState(tmp_path, RunId("other")).read() is None


def test_a_write_that_was_cut_off_leaves_the_state_before(tmp_path):
    state = SideState(tmp_path, RunId("one"))
    state.save({"steps": torch.tensor(3)})
    (tmp_path / "run-one" / f"{STATE_FILE}.partial").write_bytes(b"half")
    assert int(state.read()["steps"]) == 3
    state.save({"steps": torch.tensor(4)})
    assert int(state.read()["steps"]) == 4


def test_a_damaged_state_is_said_to_be_one(tmp_path):
    state = SideState(tmp_path, RunId("one"))
    state.save({"steps": torch.tensor(3), "weights": torch.ones(40)})
    file = tmp_path / "run-one" / STATE_FILE
    content = bytearray(file.read_bytes())
    content[-5] ^= 16
    for damaged in (bytes(content), b"\xff" * 40):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            state.read()
