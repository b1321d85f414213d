"""Rows come back by number, whatever the pieces they came in and wherever they lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.sidetuning.row_store import FileRows, MemoryRows

ROW_BYTES = 12
ROWS = np.random.default_rng(0).integers(0, 256, (60, ROW_BYTES), dtype=np.uint8)


@pytest.fixture(scope="module", params=["blocks of memory", "a file"])
def new_store(request, tmp_path_factory):
    """Makes an empty store; in memory, of blocks that hold seven rows."""
    folder, made = tmp_path_factory.mktemp("rows"), 0

    def make():
        nonlocal made
        made += 1
        if request.param == "a file":
            return FileRows(folder / str(made), ROW_BYTES, 0)
        return MemoryRows(ROW_BYTES, block_bytes=7 * ROW_BYTES + 5)

    return make


@given(
    pieces=st.lists(st.integers(0, 15), min_size=1, max_size=4),
    kept=st.integers(0, 60),
    wanted=st.lists(st.integers(0, 59), max_size=9),
)
def test_rows_come_back_by_number_after_some_were_forgotten_and_others_added(new_store, pieces, kept, wanted):
    store = new_store()
    for start, stop in zip(np.cumsum([0, *pieces]), np.cumsum(pieces), strict=False):
        store.append(ROWS[start:stop])
    kept = min(kept, store.rows)
    store.truncate(kept)
    store.append(ROWS[kept:])
    assert store.rows == 60
    assert np.array_equal(store.take(np.array(wanted, np.int64)), ROWS[wanted])
    store.close()
