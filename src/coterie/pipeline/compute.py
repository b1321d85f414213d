"""Where torch computes: one stage at a time within a process, its out-of-memory errors turned into ours."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coterie.errors import OutOfMemoryError

COMPUTE_LOCK = threading.RLock()
"""Dropout draws from torch's default generator, which belongs to the process and is seeded before every block: stages
that share a process (tests, notebooks) must not draw in between. Alone in its process a stage never waits for it."""

_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python failed to allocate; on a CPU torch raises a plain `RuntimeError`."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


@contextmanager
def computing(name: str) -> Iterator[None]:
    """Hold the compute lock, and name whose memory ran out.

    Raises:
        OutOfMemoryError: Torch or Python could not allocate.
    """
    with COMPUTE_LOCK:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"{name} ran out of memory: {str(error).splitlines()[0] if str(error) else 'allocation failed'}",
                hint="give the device a larger budget, use more micro-batches or LoRA, or plan with --objective memory",
            ) from error
