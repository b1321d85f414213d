"""The log of records, cut at any byte and damaged at any."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ActivationCacheError
from coterie.sidetuning import cache_index
from coterie.sidetuning.cache_index import ArrayRecord, BatchRecord, CacheIndex, CollectionRecord, encode_record


def record(number):
    array = ArrayRecord(dtype="int64", shape=(1,), data=number.to_bytes(8, "little"))
    return BatchRecord(
        step_key=(number, 0), first_row=number, rows=1, samples=array, counts=array, checksums=array, labels=array,
        loss_index=None,
    )  # fmt: skip


RECORDS = [CollectionRecord(digest="d", first_sample=0, samples=9), record(0), record(1), record(2)]
LOG = b"".join(encode_record(one) for one in RECORDS)
ENDS = [len(b"".join(encode_record(one) for one in RECORDS[:count])) for count in range(len(RECORDS) + 1)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("index") / "index.log"


def opened(path, data):
    path.write_bytes(data)
    index = CacheIndex(path)
    index.close()
    return index


def test_records_come_back_in_order(path):
    path.unlink(missing_ok=True)
    index = CacheIndex(path)
    for one in RECORDS:
        index.append(one, encode_record(one))
    index.close()
    assert path.read_bytes() == LOG
    again = opened(path, LOG)
    assert again.records == RECORDS
    assert again.collections == RECORDS[:1]
    assert again.batches == RECORDS[1:]
    assert again.rows == 3


@given(length=st.integers(0, len(LOG)))
def test_a_log_that_ends_anywhere_keeps_all_whole_records_and_loses_the_torn_one(path, length):
    index = opened(path, LOG[:length])
    whole = max(count for count, end in enumerate(ENDS) if end <= length)
    assert index.records == RECORDS[:whole]
    assert path.read_bytes() == LOG[: ENDS[whole]]


@given(length=st.integers(0, len(LOG)), zeros=st.integers(1, 5000))
def test_zeros_where_the_disk_had_no_time_are_cut_off(path, length, zeros):
    """A file system may keep a file's new length without its new bytes."""
    index = opened(path, LOG[:length] + bytes(zeros))
    assert index.records[: len(index.records)] == RECORDS[: len(index.records)]
    assert len(index.records) >= max(count for count, end in enumerate(ENDS) if end <= length)
    assert path.stat().st_size == ENDS[len(index.records)]


@given(at=st.integers(0, ENDS[3] - 1), bit=st.integers(0, 7))
def test_a_changed_bit_before_the_last_record_is_damage_and_nothing_is_cut_off(path, at, bit):
    data = bytearray(LOG)
    data[at] ^= 1 << bit
    with pytest.raises(ActivationCacheError, match=r"is damaged at byte \d+ of"):
        opened(path, bytes(data))
    assert path.read_bytes() == bytes(data)


def test_a_record_of_a_newer_version_is_named_as_such(path):
    body = msgspec.msgpack.encode(["later", 1])
    with pytest.raises(ActivationCacheError, match="does not understand"):
        opened(path, LOG + cache_index._head(body) + body)
