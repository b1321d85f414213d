"""Files that only this user can read: keys, tickets, digests of tokens."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, whole or not at all, onto the disk itself.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")  # made with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can enter, or make an existing one so.

    Raises:
        OSError: It cannot be made, or belongs to somebody else.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
