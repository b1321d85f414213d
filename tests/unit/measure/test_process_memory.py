import mmap
import subprocess
import sys

import pytest

from coterie.measure.process_memory import (
    current_rss_bytes,
    is_out_of_memory,
    limit_memory,
    peak_rss_bytes,
    reset_peak,
)
from coterie.units import MIB

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets peaks and enforces limits")


def touch(size: int) -> mmap.mmap:
    """A private mapping of `size` bytes, all of them resident."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, size, mmap.PAGESIZE):
        block[offset] = 1
    return block


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)


def test_touched_memory_shows_in_the_resident_size() -> None:
    before = current_rss_bytes()
    block = touch(48 * MIB)
    assert current_rss_bytes() - before == pytest.approx(48 * MIB, abs=4 * MIB)
    block.close()


@linux_only
def test_the_peak_remembers_what_was_freed_until_it_is_reset() -> None:
    assert reset_peak()
    start = peak_rss_bytes()
    touch(48 * MIB).close()
    assert peak_rss_bytes() - start == pytest.approx(48 * MIB, abs=4 * MIB)
    assert reset_peak()
    assert peak_rss_bytes() - start < 8 * MIB


@linux_only
def test_an_enforced_limit_gives_a_catchable_error_close_to_the_limit() -> None:
    code = """
from coterie.measure.process_memory import limit_memory, current_rss_bytes, peak_rss_bytes
limit = 160 * 2**20
assert limit_memory(limit)
blocks = []
try:
    while True:
        blocks.append(bytearray(b"x") * 2**20)
except MemoryError:
    at = peak_rss_bytes()
    del blocks
    print(at / limit)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert 0.95 <= float(done.stdout) <= 1.02


@linux_only
def test_a_limit_below_the_present_use_is_reported_as_not_enforced() -> None:
    assert limit_memory(current_rss_bytes() - MIB) is False


@linux_only
def test_torch_reports_the_limit_as_an_error_that_is_recognised() -> None:
    code = """
import torch
from coterie.measure.process_memory import limit_memory, current_rss_bytes, is_out_of_memory
assert limit_memory(current_rss_bytes() + 32 * 2**20)
try:
    torch.ones(64 * 2**20)
except RuntimeError as error:
    assert is_out_of_memory(error), error
    print("caught")
assert torch.ones(4).sum() == 4
"""
    done = run_python(code)
    assert done.stdout.strip() == "caught", done.stderr


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_exhausted_memory_are_told_from_others(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_measuring_memory_needs_no_torch() -> None:
    code = """
import sys
import coterie.measure.process_memory, coterie.measure.budget, coterie.measure.allocator, coterie.profiles.cache
assert "torch" not in sys.modules
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@linux_only
def test_a_limit_can_be_taken_back_before_the_process_ends() -> None:
    code = """
from coterie.measure.process_memory import current_rss_bytes, lift_memory_limit, limit_memory, private_limit_bytes
assert limit_memory(current_rss_bytes() + (32 << 20))
assert private_limit_bytes() is not None
lift_memory_limit()
print(private_limit_bytes(), len(bytearray(64 << 20)))
"""
    assert run_python(code).stdout.split() == ["None", str(64 * MIB)]


@linux_only
def test_a_limit_that_is_renewed_holds_what_was_given_back_but_stays_mapped_against_nobody() -> None:
    code = """
import mmap
from coterie.measure.process_memory import current_rss_bytes, limit_memory, renew_memory_limit

MIB = 1 << 20
limit = current_rss_bytes() + 64 * MIB
assert limit_memory(limit)
block = mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for offset in range(0, len(block), mmap.PAGESIZE):
    block[offset] = 1
block.madvise(mmap.MADV_DONTNEED)  # what an allocator does with a hole in its heap

def fits(size):
    try:
        return bool(bytearray(size))
    except MemoryError:
        return False

print(fits(48 * MIB))
renew_memory_limit(limit)
print(fits(48 * MIB), fits(128 * MIB))
"""
    done = run_python(code)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


@linux_only
def test_a_limit_that_somebody_else_has_set_since_is_not_renewed() -> None:
    code = """
import resource
from coterie.measure.process_memory import current_rss_bytes, limit_memory, private_limit_bytes, renew_memory_limit

limit = current_rss_bytes() + (64 << 20)
assert limit_memory(limit)
tighter = private_limit_bytes() - (32 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (tighter, resource.getrlimit(resource.RLIMIT_DATA)[1]))
renew_memory_limit(limit)
print(private_limit_bytes() == tighter)
"""
    done = run_python(code)
    assert done.stdout.split() == ["True"], done.stderr
