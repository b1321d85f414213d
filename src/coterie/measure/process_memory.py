"""What this process uses of the machine's memory, its peak, and a hard limit on it."""

import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5): resets VmHWM to the current resident size

_OUT_OF_MEMORY_WORDS = (
    "can't allocate memory",  # torch on the CPU, POSIX
    "not enough memory",  # torch on the CPU, Windows
    "out of memory",  # CUDA, MPS, XPU
    "bad allocation",  # std::bad_alloc through pybind
    "std::bad_alloc",
    "cannot allocate memory",  # errno 12
    "could not create a primitive",  # oneDNN, whose code and scratch space are allocations too
)


def current_rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Largest resident memory of this process since it started, or since `reset_peak` where that works."""
    if sys.platform == "linux":
        return _status_bytes("VmHWM")
    elif sys.platform == "win32":  # noqa: RET505 - mypy checks one platform's branch, and needs to see them as branches
        return int(psutil.Process().memory_info().peak_wset)
    else:
        import resource  # noqa: PLC0415 - does not exist on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the BSDs KiB


def reset_peak() -> bool:
    """Start a new peak at the current resident memory; False where the system cannot (all but Linux)."""
    if sys.platform != "linux":
        return False
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # a sandbox without a writable /proc
        return False
    return True


_LIMITS_SET: list[int] = []
"""What `limit_memory` has set, in the process's own terms."""


def is_own_limit(private_bytes: int | None) -> bool:
    """Whether such a `private_limit_bytes` is what `limit_memory` set last."""
    return private_bytes in _LIMITS_SET[-1:]


def limit_memory(limit_bytes: int) -> bool:
    """Make every allocation fail, with a catchable error, that would take this process above `limit_bytes` in all.

    The limit is set on writable private memory (RLIMIT_DATA), which from here on grows with the resident memory;
    RLIMIT_AS would also count hundreds of MiB of mapped libraries. Call it when imports are done: the distance
    between now and the limit is what may still be mapped. Memory that is mapped but never touched (a new thread's
    stack) counts too.

    Returns:
        True if the system enforces the limit; False where it cannot (macOS accepts the call and ignores it, Windows has
        none), and where the process is above `limit_bytes` already.
    """
    if sys.platform != "linux":
        return False
    import resource  # noqa: PLC0415 - does not exist on Windows

    headroom = limit_bytes - current_rss_bytes()
    if headroom <= 0:
        return False
    data_bytes = _status_bytes("VmData") + headroom
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        data_bytes = min(data_bytes, hard)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, hard))
    except (OSError, ValueError):
        return False
    _LIMITS_SET.append(data_bytes)
    return resource.getrlimit(resource.RLIMIT_DATA)[0] == data_bytes


def renew_memory_limit(limit_bytes: int) -> None:
    """Count anew for the limit that `limit_memory` has set, unless somebody has changed it since.

    Memory that a stage gave back stays mapped, in holes between what is still used, and would be held against the next.
    """
    if is_own_limit(private_limit_bytes()):
        limit_memory(limit_bytes)


def lift_memory_limit() -> None:
    """Take the limit back as far as the system allows, for the end of a process: to end in order it needs a thread."""
    if sys.platform == "linux":
        import resource  # noqa: PLC0415 - does not exist on Windows

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def private_limit_bytes() -> int | None:
    """The limit on this process's writable private memory, as `limit_memory` or somebody else set it; None: none."""
    if sys.platform != "linux":
        return None
    import resource  # noqa: PLC0415 - does not exist on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def data_limit_bytes() -> int | None:
    """What this process may use in all under that limit; None where there is none.

    Private memory that was mapped and never touched counts as if it were used.
    """
    limit = private_limit_bytes()
    return None if limit is None else max(current_rss_bytes() + limit - _status_bytes("VmData"), 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on any device (on the CPU torch raises a plain RuntimeError)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = str(error).lower()
    return any(words in text for words in _OUT_OF_MEMORY_WORDS)


def _status_bytes(field: str) -> int:
    """A size out of /proc/self/status, which counts in KiB."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no line {field}")
