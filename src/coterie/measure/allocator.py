"""The C library's allocator, told to give memory back.

glibc raises its mmap threshold by itself as large blocks are freed; from then on activations are cut out of the heap,
which fragments: a micro-batch of 41 MiB costs up to 79 MiB of resident memory. With the threshold fixed at 128 KiB
every tensor larger than that is a mapping of its own, so resident memory is what is alive, and can be predicted. It
costs 1 to 30 % CPU (page faults), less the larger the model.
"""

import ctypes
import gc
import sys

THRESHOLD_BYTES = 128 * 1024
"""glibc's own start value; setting it explicitly stops glibc from raising it."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def use_tight_allocator() -> bool:
    """Switch this process to the tight allocator; False where the C library has no such setting (all but glibc)."""
    libc = _glibc()
    if libc is None:
        return False
    mapped: bool = libc.mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES) == 1
    trimmed: bool = libc.mallopt(_M_TRIM_THRESHOLD, THRESHOLD_BYTES) == 1
    return mapped and trimmed


def use_one_arena() -> bool:
    """Let all threads share one heap; False where the C library cannot.

    By default each thread gets its own, and what one has freed (the weights that came over the network, a measurement)
    is of no use to the others. Call it before threads start.
    """
    libc = _glibc()
    return libc is not None and libc.mallopt(_M_ARENA_MAX, 1) == 1


def trim_heap() -> bool:
    """Give free heap pages back to the system now; False where the C library cannot."""
    libc = _glibc()
    if libc is None:
        return False
    libc.malloc_trim(0)
    return True


def free_memory() -> None:
    """Collect what only refers to itself (a model's modules do), and give what is free back to the system."""
    gc.unfreeze()
    set_aside()
    trim_heap()


def set_aside() -> None:
    """Collect, then have garbage collections look no more at the objects that are left, until `free_memory`.

    Imported libraries are half a million of them: a full collection takes a third of a second, and training on several
    backends begins one every few steps.
    """
    gc.collect()  # what is garbage now would stay
    gc.freeze()


def tight_environment() -> dict[str, str]:
    """Variables with which a child process has the tight allocator from its first allocation on (glibc only)."""
    value = str(THRESHOLD_BYTES)
    return {"MALLOC_MMAP_THRESHOLD_": value, "MALLOC_TRIM_THRESHOLD_": value}


def _glibc() -> ctypes.CDLL | None:
    """The running process's glibc; None on other systems, on musl, or when another allocator replaces it."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")):
        return None
    return libc
