"""Files and folders that are whole or absent, whatever moment the power fails."""

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from coterie.checkpoint.names import PARTIAL, REPLACED
from coterie.errors import StorageError
from coterie.units import format_bytes

REMOVING = ".removing"
"""Ending of a folder that is being deleted: a half-deleted one must not look like a damaged one."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_file(descriptor: int) -> None:
    """Put an open file's bytes onto the disk itself."""
    if sys.platform == "darwin":
        import fcntl  # noqa: PLC0415 - absent on Windows

        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync alone stops at the drive's cache there
        except OSError:
            os.fsync(descriptor)  # a network share knows no F_FULLFSYNC
    else:
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names onto the disk. Windows has no such call and orders its journal itself."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Put every file below `folder`, and the folders themselves, onto the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb+") as file:
                sync_file(file.fileno())
    sync_folder(folder)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and put it onto the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        sync_file(file.fileno())


def publish_folder(partial: Path, final: Path) -> None:
    """Give a finished folder its name; one that had the name before is gone afterwards.

    No system replaces a non-empty folder in one call, so the old one steps aside first. `settle` undoes a crash
    between the two renames.
    """
    aside = final.with_name(final.name + REPLACED)
    if final.exists():
        remove_folder(aside)
        final.rename(aside)
    partial.rename(final)
    sync_folder(final.parent)
    remove_folder(aside)


def remove_folder(folder: Path) -> None:
    """Delete a folder, under another name so that a crash in the middle leaves nothing that looks like it."""
    if not folder.exists():
        return
    doomed = folder if folder.name.endswith(REMOVING) else folder.with_name(folder.name + REMOVING)
    if doomed != folder:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    # Windows refuses to delete a file that a reader still maps; the next `settle` deletes the rest.
    shutil.rmtree(doomed, ignore_errors=True)


def settle(parent: Path, names: re.Pattern[str]) -> None:
    """Finish what a crash left undone with the folders of `parent` that `names` matches.

    A replaced folder gets its name back if the new one never came, unfinished and half-deleted ones go. Only for who
    is about to write: to a reader, a `.partial` may be another process at work.
    """
    for path in sorted(parent.iterdir()):
        stem = path
        while stem.suffix in {PARTIAL, REPLACED, REMOVING}:
            stem = stem.with_suffix("")
        if stem == path or not names.fullmatch(stem.name):
            continue
        if path.suffix == REPLACED and not stem.exists():
            path.rename(stem)
        else:
            remove_folder(path)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuse before writing when `folder`'s disk has fewer than `needed_bytes` free.

    Raises:
        StorageError: Too little is free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise _too_full(folder, needed_bytes, free)


@contextmanager
def storage_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn what the file system raises while writing into `folder` into a `StorageError` with numbers.

    Raises:
        StorageError: The disk is full, or the folder cannot be written.
    """
    try:
        yield
    except ConnectionError:  # whoever sends the bytes is gone: no fault of the disk
        raise
    except SafetensorError as error:  # its writer wraps what the system said into text
        raise StorageError(
            f"could not write in {folder}, where {format_bytes(_free_bytes(folder))} are free: {error}",
            hint="free some space or choose another folder",
        ) from error
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _too_full(folder, needed_bytes, _free_bytes(folder)) from error
        raise StorageError(
            f"could not write in {folder}: {error.strerror or error}", hint="check that the folder is writable"
        ) from error


def _free_bytes(folder: Path) -> int:
    """Free bytes on the disk that holds `folder` or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _too_full(folder: Path, needed_bytes: int, free_bytes: int) -> StorageError:
    """The error of a disk without room, both numbers in it."""
    return StorageError(
        f"not enough room in {folder}: {format_bytes(needed_bytes)} needed, {format_bytes(free_bytes)} free "
        "(or less, where a quota or a file size limit applies)",
        hint="free some space or choose another folder; what was saved before is untouched",
    )
