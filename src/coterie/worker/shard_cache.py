"""Frozen tensors that a device has received, kept on disk by the digest of their bytes: nothing is fetched twice.

Only what training never changes is offered by the coordinator, so nothing that a run learns is ever kept here. A file
is its bytes and nothing else; whoever reads one checks its digest first: a damaged one is thrown away and fetched anew.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np

from coterie.cluster.shard_messages import ShardPart
from coterie.errors import ProtocolError
from coterie.logs import get_logger
from coterie.transport.frame import Buffer, TensorSpec
from coterie.transport.limits import Limits, check_tensor
from coterie.transport.wire import flat_view
from coterie.units import GIB, format_bytes

log = get_logger(__name__)

LEFT_FREE_BYTES = 1 * GIB
"""Of the disk: a cache must not be what fills it."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ShardCache:
    """One folder; several workers of a machine may share it. Blocks: call it from a thread.

    Args:
        folder: Made at the first tensor.
        quota_bytes: What was used longest ago goes when there is more.
    """

    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self.folder = folder
        self._quota_bytes = quota_bytes
        self._used_bytes = sum(size for _, _, size in self._files())

    def load(self, part: ShardPart) -> Buffer | None:
        """The bytes of a tensor, found to be the right ones; None if they are not here.

        Raises:
            ProtocolError: The part contradicts itself, or would be too large to be received.
        """
        check_part(part)
        path = self._path(part.digest)
        buffer = None
        try:
            if path.stat().st_size == part.nbytes:
                buffer = _read(path, part.nbytes)
            if buffer is None or digest_of(buffer) != part.digest:
                log.warning("the cached shard %s is damaged and fetched anew", path.name)
                path.unlink()
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the cached shard %s cannot be read: %s", path.name, error.strerror or error)
            return None
        return buffer

    def store(self, digest: str, buffer: Buffer) -> None:
        """Keep a tensor's bytes, of which this is the digest. A disk that cannot be written costs time, not the run."""
        data = flat_view(buffer)
        path = self._path(digest)
        try:
            if path.exists() or not self._make_room(data.nbytes):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                Path(temporary).replace(path)  # a power cut may leave less than all of it: the digest tells
            except OSError:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
            self._used_bytes += data.nbytes
        except OSError as error:
            log.warning("a shard cannot be kept in %s: %s", self.folder, error.strerror or error)

    def _make_room(self, nbytes: int) -> bool:
        """Whether there is room, after what was used longest ago has gone."""
        if nbytes > self._quota_bytes:
            return False
        if self._used_bytes + nbytes > self._limit_bytes():
            self._evict(nbytes)
        return self._used_bytes + nbytes <= self._limit_bytes()

    def _limit_bytes(self) -> int:
        """The quota, or less where the disk is nearly full."""
        free = shutil.disk_usage(_nearest(self.folder)).free
        return min(self._quota_bytes, self._used_bytes + free - LEFT_FREE_BYTES)

    def _evict(self, nbytes: int) -> None:
        files = sorted(self._files(), key=lambda file: file[1])  # another worker may have added or removed some
        self._used_bytes = sum(size for _, _, size in files)
        for path, _, size in files:
            if self._used_bytes + nbytes <= self._limit_bytes():
                return
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                self._used_bytes -= size
                log.info("the cached shard %s (%s) made room for another", path.name, format_bytes(size))

    def _files(self) -> list[tuple[Path, float, int]]:
        """Every kept file with the time of its last use and its size."""
        found = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):  # gone meanwhile
                status = path.stat()
                found.append((path, status.st_mtime, status.st_size))
        return found

    def _path(self, digest: str) -> Path:
        assert _DIGEST.fullmatch(digest), "a path is made of checked digests only"
        return self.folder / digest[:2] / digest


def digest_of(buffer: Buffer) -> str:
    """SHA-256 of a tensor's bytes, in hex."""
    return hashlib.sha256(flat_view(buffer)).hexdigest()


def spec_of(part: ShardPart) -> TensorSpec:
    """The part as the tensor of a frame."""
    return TensorSpec(name=part.name, dtype=part.dtype, shape=part.shape, nbytes=part.nbytes)


def check_part(part: ShardPart) -> None:
    """Check what a coordinator says of a tensor before any memory is taken for it.

    Raises:
        ProtocolError: It contradicts itself.
    """
    if _DIGEST.fullmatch(part.digest) is None:
        raise ProtocolError(f"tensor {part.name[:80]!r} was offered with a digest that is none")
    check_tensor(spec_of(part), Limits())


def _read(path: Path, nbytes: int) -> Buffer | None:
    """A file's bytes; None if it has become shorter meanwhile."""
    buffer = np.empty(nbytes, np.uint8)
    with path.open("rb") as file:
        return buffer.data if file.readinto(buffer.data) == nbytes else None


def _nearest(folder: Path) -> Path:
    """The folder or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
