"""One run per folder: a lock that the system takes back when its process ends, however it ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from coterie.errors import StorageError, UsageError

LOCK = "run.lock"


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a run's folder while the block runs.

    Raises:
        UsageError: Another run holds it.
        StorageError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise UsageError(
            f"another run is using {folder}",
            hint="wait for it or stop it, or give this run a folder of its own with --output",
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot write {folder}: {error.strerror or error}", hint="choose another folder with --output"
        ) from error
    try:
        yield
    finally:
        lock.release()
