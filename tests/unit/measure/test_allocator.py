import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest

from coterie.measure import allocator
from coterie.measure.allocator import free_memory, set_aside, tight_environment, trim_heap, use_tight_allocator

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")

# Freeing a 16 MiB block raises glibc's threshold to 16 MiB, so that later blocks come from the heap; of these, all but
# the last are freed, and the last keeps the heap from shrinking.
_FRAGMENT = """
import ctypes
from coterie.measure.process_memory import current_rss_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def block(size):
    pointer = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(ctypes.c_void_p(pointer), 1, size)
    return pointer
libc.free(block(16 * 2**20))
before = current_rss_bytes()
blocks = [block(2**20) for _ in range(64)]
for pointer in blocks[:-1]:
    libc.free(pointer)
print((current_rss_bytes() - before) >> 20)
"""


def kept_mib(prefix: str = "", environment: dict[str, str] | None = None) -> int:
    """MiB that a process keeps after freeing 63 of 64 blocks of 1 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", prefix + _FRAGMENT],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env={**os.environ, **(environment or {})},
    )
    return int(done.stdout)


@glibc_only
def test_the_tight_allocator_gives_back_what_the_default_keeps() -> None:
    assert kept_mib() > 40
    assert kept_mib("from coterie.measure.allocator import use_tight_allocator as use; assert use()\n") < 8


@glibc_only
def test_a_child_has_the_tight_allocator_by_its_environment() -> None:
    assert kept_mib(environment=tight_environment()) < 8


def test_a_system_without_glibc_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert use_tight_allocator() is False
    assert trim_heap() is False


def test_what_is_set_aside_is_collected_when_memory_is_freed() -> None:
    class Knot:
        pass

    knot = Knot()
    knot.itself = knot  # type: ignore[attr-defined] # refers to itself, as a model's modules do
    gone = weakref.ref(knot)
    other = Knot()
    other.itself = other  # type: ignore[attr-defined] # as above
    garbage = weakref.ref(other)
    del other
    set_aside()
    assert garbage() is None, "what is garbage by then must not stay"
    del knot
    gc.collect()
    assert gone() is not None, "no collection looks at it"
    free_memory()
    assert gone() is None
