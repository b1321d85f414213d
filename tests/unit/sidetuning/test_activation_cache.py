"""The cache: what goes in comes out, once and whole, or is refused with the reason."""

import resource
import threading
from contextlib import contextmanager

import msgspec
import pytest
import torch

from coterie.errors import ActivationCacheError, ModelError, ProtocolError, StorageError
from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.activations import join_rows
from coterie.units import GIB

DTYPES = ["float32", "float16", "int8", "int4"]


@pytest.fixture(params=["memory", "disk"])
def opened(request, tmp_path, layout):
    """Opens the cache of a test: in memory, or in its folder."""
    caches = []

    def make(quota_bytes=GIB, wanted=layout):
        caches.append(
            ActivationCache.open(tmp_path / "cache" if request.param == "disk" else None, wanted, quota_bytes)
        )
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


@pytest.fixture
def reopened(tmp_path, layout):
    """Opens the folder's cache anew after closing the one before."""
    caches = []

    def make(wanted=layout, quota_bytes=GIB):
        while caches:
            caches.pop().close()
        caches.append(ActivationCache.open(tmp_path / "cache", wanted, quota_bytes))
        return caches[-1]

    yield make
    while caches:
        caches.pop().close()


@pytest.mark.parametrize("in_loss", ["all", "last"])
def test_samples_come_back_bit_for_bit_in_any_order_and_company(opened, batch_of, same, in_loss):
    cache = opened()
    for step, samples in enumerate(([3, 1, 4], [15, 9], [2], [6, 5])):
        cache.put(batch_of(samples, in_loss=in_loss), (step, 0))
    assert cache.samples == (3, 1, 4, 15, 9, 2, 6, 5)
    assert len(cache) == 8
    assert 9 in cache
    assert 7 not in cache
    for wanted in ([9, 2, 3], [5], [6, 15, 1, 4, 2, 9, 3, 5], [4, 4]):
        assert same(cache.read(wanted), batch_of(wanted, in_loss=in_loss))
        assert same(cache.read(torch.tensor(wanted)), batch_of(wanted, in_loss=in_loss))
    cache.verify()


def test_samples_without_tokens_and_batches_without_samples_are_kept(opened, batch_of, same):
    cache = opened()
    cache.put(batch_of([1, 2], tokens=0), (0, 0))
    cache.put(batch_of([]), (1, 0))
    cache.put(batch_of([5]), (2, 0))
    assert same(cache.read([2, 5, 1]), join_rows([batch_of([2], tokens=0), batch_of([5]), batch_of([1], tokens=0)]))
    assert cache.read([]).rows == 0


def test_what_is_in_a_folder_is_there_again(reopened, batch_of, same):
    cache = reopened()
    assert cache.collection("first data", 10) == 0
    cache.put(batch_of([3, 1]), (0, 0))
    cache.put(batch_of([2]), (0, 1))
    used = cache.used_bytes
    cache = reopened()
    assert cache.samples == (3, 1, 2)
    assert cache.used_bytes == used
    assert same(cache.read([1, 2]), batch_of([1, 2]))
    cache.put(batch_of([7]), (1, 0))
    assert same(reopened().read([7, 3]), batch_of([7, 3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_types_store_fewer_bytes_and_give_what_their_coder_gives(opened, batch_of, layout, dtype):
    layout = msgspec.structs.replace(layout, dtype=dtype)
    cache = opened(wanted=layout)
    batch = batch_of([1, 2, 3])
    cache.put(batch, (0, 0))
    coder = layout.coder
    assert torch.equal(cache.read([1, 2, 3]).taps, coder.decode(coder.encode(batch.taps)))
    assert layout.bytes_for(batch.tokens) == batch.tokens * coder.row_bytes


def test_the_same_batch_again_changes_nothing(opened, batch_of, same):
    cache = opened()
    cache.put(batch_of([3, 1]), (0, 0))
    used = cache.used_bytes
    cache.put(batch_of([3, 1]), (0, 0))
    cache.put(batch_of([1]), (5, 0))
    assert cache.used_bytes == used
    cache.put(batch_of([1, 8, 3, 9]), (1, 0))
    assert cache.samples == (3, 1, 8, 9)
    assert same(cache.read([8, 1, 9]), batch_of([8, 1, 9]))


@pytest.mark.parametrize("changed", ["taps", "labels", "counts"])
def test_a_sample_again_with_other_content_is_refused_and_nothing_is_stored(opened, batch_of, same, changed):
    cache = opened()
    cache.put(batch_of([3, 1]), (0, 0))
    other = batch_of([1, 8], tokens=3) if changed == "counts" else batch_of([1, 8])
    if changed != "counts":
        getattr(other, changed)[0] += 1
    with pytest.raises(ActivationCacheError, match=r"step \(1, 0\) brings samples \[1\] again, with other content"):
        cache.put(other, (1, 0))
    assert cache.samples == (3, 1)
    assert same(cache.read([1]), batch_of([1]))


def test_activations_that_differ_by_less_than_the_stored_type_can_tell_are_the_same(opened, batch_of, layout):
    cache = opened(wanted=msgspec.structs.replace(layout, dtype="float16"))
    batch = batch_of([3, 1])
    cache.put(batch, (0, 0))
    cache.put(msgspec.structs.replace(batch, taps=batch.taps.half().float()), (0, 0))
    assert len(cache) == 2


def test_a_batch_that_exceeds_the_quota_is_refused_with_numbers_and_the_cache_goes_on(opened, batch_of, same, layout):
    cache = opened(quota_bytes=layout.bytes_for(12) + 600)
    cache.put(batch_of([3, 1]), (0, 0))
    with pytest.raises(
        ActivationCacheError,
        match=r"of 20 samples of step \(1, 0\) need .* KiB; of the cache's quota of 1.71 KiB, .* are used",
    ) as caught:
        cache.put(batch_of(range(10, 30)), (1, 0))
    assert "raise the quota" in caught.value.hint
    assert "data that are used no more" in caught.value.hint
    cache.put(batch_of([2]), (2, 0))
    assert same(cache.read([2, 3]), batch_of([2, 3]))
    assert cache.used_bytes <= cache.quota_bytes


def test_data_that_cannot_fit_are_refused_before_anything_is_collected(opened):
    cache = opened(quota_bytes=100_000)
    cache.require_room(500)
    with pytest.raises(
        ActivationCacheError, match=r"1000 selected tokens need .* of the cache's quota of 97.7 KiB, 0 B"
    ):
        cache.require_room(1000)


def test_data_that_exceed_the_disk_are_refused_before_anything_is_collected(reopened):
    with pytest.raises(StorageError, match="not enough room in"):
        reopened(quota_bytes=10**18).require_room(10**15)


def test_room_is_asked_for_on_the_disk_for_what_lies_beside_the_cache_and_the_quota_does_not_count_it(reopened):
    cache = reopened(quota_bytes=1000)
    cache.require_room(0, beside_bytes=2000)
    with pytest.raises(StorageError, match="not enough room in"):
        cache.require_room(0, beside_bytes=10**18)


def test_rows_whose_index_is_gone_are_not_cut_off(reopened, batch_of, tmp_path):
    with reopened() as cache:
        cache.put(batch_of([3, 1]), (0, 0))
    (index,) = tmp_path.rglob("index.log")
    rows = index.with_name("rows.bin").read_bytes()
    index.unlink()
    with pytest.raises(ActivationCacheError, match=r"and no index\.log"):
        reopened()
    assert index.with_name("rows.bin").read_bytes() == rows


def test_a_cache_made_for_something_else_is_refused_with_all_that_differs(reopened, layout):
    reopened()
    other = msgspec.structs.replace(
        layout, layers=(2, 3), dtype="int8", key={"model": "b" * 64, "max_tokens": "256", "tokens": "last", "task": "x"}
    )
    with pytest.raises(ActivationCacheError) as caught:
        reopened(other)
    assert caught.value.message.partition(": ")[2] == (
        "it holds layers 1-3, this run needs 2, 3; stored as float32 there, as int8 here; max_tokens is 128 there, 256 "
        f"here; model is {'a' * 12}… there, {'b' * 12}… here; task is not given there, x here"
    )
    reopened()


def test_a_folder_in_use_is_refused(reopened, tmp_path, layout):
    reopened()
    with pytest.raises(ActivationCacheError, match="another process is using the cache"):
        ActivationCache.open(tmp_path / "cache", layout, GIB)


def test_a_damaged_layout_is_refused(reopened, tmp_path):
    reopened()
    path = tmp_path / "cache" / "layout.json"
    path.write_text(path.read_text().replace("128", "129"))
    with pytest.raises(ActivationCacheError, match=r"layout.json is damaged \(its hash does not match\)"):
        reopened()
    path.write_text(path.read_text()[:50])
    with pytest.raises(ActivationCacheError, match="is damaged"):
        reopened()


def test_a_layout_of_a_newer_format_is_named_as_such(reopened, tmp_path):
    reopened()
    path = tmp_path / "cache" / "layout.json"
    path.write_text(path.read_text().replace('"format_version":1', '"format_version":9'))
    with pytest.raises(ActivationCacheError, match="has format version 9; this program reads up to version 1"):
        reopened()


def test_a_changed_byte_is_found_when_its_sample_is_read_and_by_verify(reopened, batch_of, same, tmp_path, layout):
    reopened().put(batch_of([3, 1, 5]), (0, 0))
    path = tmp_path / "cache" / "rows.bin"
    data = bytearray(path.read_bytes())
    data[layout.bytes_for(1) + 5] ^= 4  # of the second sample: the first has one row
    path.write_bytes(data)
    cache = reopened()
    assert same(cache.read([3, 5]), batch_of([3, 5]))
    for _ in range(2):
        with pytest.raises(
            ActivationCacheError, match=r"1 sample of the cache in .* changed since they were written: 1$"
        ):
            cache.read([3, 1])
    with pytest.raises(ActivationCacheError, match=r"written: 1$"):
        cache.verify()


def test_rows_that_the_index_knows_and_the_file_lacks_are_damage(reopened, batch_of, tmp_path):
    reopened().put(batch_of([3, 1, 5]), (0, 0))
    path = tmp_path / "cache" / "rows.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ActivationCacheError, match=r"rows.bin is 1 B shorter than the 576 B that its index knows"):
        reopened()


def test_rows_that_no_record_knows_are_cut_off(reopened, batch_of, same, tmp_path):
    reopened().put(batch_of([3, 1, 5]), (0, 0))
    path = tmp_path / "cache" / "rows.bin"
    whole = path.read_bytes()
    path.write_bytes(whole + b"half a batch")
    cache = reopened()
    assert path.read_bytes() == whole
    cache.put(batch_of([8]), (1, 0))
    assert same(reopened().read([8, 5]), batch_of([8, 5]))


def test_a_batch_cut_anywhere_is_absent_and_all_before_it_intact(batch_of, same, tmp_path, layout):
    """Whatever a kill leaves of the last batch: rows in part, or all rows and its record in part."""
    with ActivationCache.open(tmp_path / "whole", layout, GIB) as cache:
        cache.put(batch_of([3, 1]), (0, 0))
        sizes = [(tmp_path / "whole" / name).stat().st_size for name in ("rows.bin", "index.log")]
        cache.put(batch_of([2, 6]), (0, 1))
    rows, index = ((tmp_path / "whole" / name).read_bytes() for name in ("rows.bin", "index.log"))
    cuts = [(length, sizes[1]) for length in range(sizes[0], len(rows), 37)]
    cuts += [(len(rows), length) for length in range(sizes[1], len(index), 29)]
    for rows_left, index_left in cuts:
        with ActivationCache.open(tmp_path / f"{rows_left}-{index_left}", layout, GIB):
            pass
        (tmp_path / f"{rows_left}-{index_left}" / "rows.bin").write_bytes(rows[:rows_left])
        (tmp_path / f"{rows_left}-{index_left}" / "index.log").write_bytes(index[:index_left])
        with ActivationCache.open(tmp_path / f"{rows_left}-{index_left}", layout, GIB) as cache:
            assert cache.samples == (3, 1)
            cache.verify()
            cache.put(batch_of([2, 6]), (0, 1))
            assert same(cache.read([6, 3, 2, 1]), batch_of([6, 3, 2, 1]))


@contextmanager
def files_of_at_most(nbytes):
    """No file of this process may grow beyond `nbytes`: what a full disk does, after as much as fits was written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("full", ["rows.bin", "index.log"])
def test_a_full_disk_leaves_the_cache_as_it_was(reopened, batch_of, same, tmp_path, full):
    cache = reopened()
    for sample in range(0, 30, 3):  # of one token each: the index is the larger file
        cache.put(batch_of([sample]), (sample, 0))
    sizes = {name: (tmp_path / "cache" / name).stat().st_size for name in ("rows.bin", "index.log")}
    large = batch_of([50], tokens=20) if full == "rows.bin" else batch_of([51])
    with files_of_at_most(sizes["index.log"] + 10), pytest.raises(StorageError, match="not enough room"):
        cache.put(large, (1, 1))
    assert {name: (tmp_path / "cache" / name).stat().st_size for name in sizes} == sizes
    assert 50 not in cache
    assert 51 not in cache
    cache.put(large, (1, 1))
    for again in (lambda: cache, reopened):
        assert same(again().read([*large.samples.tolist(), 27, 0]), join_rows([large, batch_of([27, 0])]))


def test_rows_are_read_while_others_are_written(opened, batch_of, same):
    cache = opened()

    def write():
        for step in range(60):
            cache.put(batch_of([2 * step, 2 * step + 1]), (step, 0))

    cache.put(batch_of([0, 1]), (0, 0))
    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        samples = cache.samples[::-3]
        assert same(cache.read(samples), batch_of(samples))
    writer.join()
    assert len(cache) == 120
    cache.verify()


def test_other_layers_or_widths_and_a_sample_twice_are_refused(opened, batch_of):
    cache = opened()
    for other in (batch_of([1], layers=(1, 2)), batch_of([1], width=4), batch_of([1], layers=(2, 3, 4))):
        with pytest.raises(ProtocolError, match="do not belong into a cache of layers"):
            cache.put(other, (0, 0))
    with pytest.raises(ProtocolError, match=r"a sample twice: \[1, 2, 1\]"):
        cache.put(batch_of([1, 2, 1]), (0, 0))
    assert cache.samples == ()


def test_activations_that_are_not_finite_are_refused(opened, batch_of):
    batch = batch_of([1, 2])
    batch.taps[1, 0, 0] = float("inf")
    with pytest.raises(ModelError, match=r"samples \[1, 2\] hold NaN or infinity"):
        opened().put(batch, (0, 0))


def test_labels_of_another_kind_are_refused(opened, batch_of):
    cache = opened()
    cache.put(batch_of([1]), (0, 0))
    floats = batch_of([2])
    floats = msgspec.structs.replace(floats, labels=floats.labels.float())
    for other in (batch_of([2], in_loss="last"), floats, msgspec.structs.replace(floats, labels=None)):
        with pytest.raises(ProtocolError, match=r"what the cache holds has labels of torch\.int64"):
            cache.put(other, (1, 0))


def test_differences_instead_of_labels_come_back_too(opened, batch_of, same):
    batch = batch_of([1, 2])
    batch = msgspec.structs.replace(batch, labels=torch.randn(batch.tokens, 5))
    cache = opened()
    cache.put(batch, (0, 0))
    assert same(cache.read([1, 2]), batch)


def test_a_sample_that_is_absent_is_named(opened, batch_of):
    cache = opened()
    cache.put(batch_of([1, 2]), (0, 0))
    with pytest.raises(ActivationCacheError, match="sample 7 is not among the 2 of the cache"):
        cache.read([1, 7])


def test_data_collected_later_get_ids_after_all_others_and_keep_them(reopened):
    cache = reopened()
    assert [cache.collection(digest, rows) for digest, rows in (("a", 10), ("b", 5), ("a", 10))] == [0, 10, 0]
    cache = reopened()
    assert [cache.collection(digest, rows) for digest, rows in (("c", 1), ("b", 5), ("a", 11))] == [15, 10, 16]
