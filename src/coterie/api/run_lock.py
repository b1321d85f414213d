"""One run per folder: a lock that the system takes back when its process ends, however it ends."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from coterie.config.cluster_section import ClusterSection
from coterie.coordinator.preflight import cannot_write
from coterie.coordinator.run_folder import LOCK
from coterie.errors import UsageError
from coterie.transport.user_settings import config_folder


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a run's folder while the block runs; one that was made for it and stayed empty is taken away again.

    Raises:
        UsageError: Another run holds it.
        StorageError: It cannot be made or written.
    """
    is_new = not folder.exists()
    busy = UsageError(
        f"another run is using {folder}",
        hint="wait for it or stop it, or give this run a folder of its own with --output",
    )
    lock = _acquired(folder / LOCK, busy)
    try:
        yield
    finally:
        lock.release()
        if is_new and [path.name for path in folder.iterdir()] in ([], [LOCK]):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def hold_door(cluster: ClusterSection) -> Iterator[None]:
    """Hold the door that this user's runs have in common, if a run wants it, while the block runs.

    Raises:
        UsageError: Another run holds it.
        StorageError: It cannot be made or written.
    """
    if not cluster.standing_link:
        yield
        return
    busy = UsageError(
        "another run of yours uses the standing link",
        hint="wait for it or stop it, or start this run without standing_link",
    )
    lock = _acquired(config_folder() / "door.lock", busy, mode=0o700)
    try:
        yield
    finally:
        lock.release()


def _acquired(file: Path, busy: UsageError, *, mode: int = 0o777) -> FileLock:
    """The lock on a file, whose folder is made (with `mode`) if it is not there; `busy` is raised if another has it."""
    lock = FileLock(file, timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=mode)
        lock.acquire()
    except Timeout as error:
        raise busy from error
    except OSError as error:
        raise cannot_write(file.parent, error) from error
    return lock
