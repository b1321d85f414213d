"""Profiles kept on disk between runs, by a key that changes when what was measured changes. Needs no torch."""

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec

from coterie.errors import StorageError
from coterie.logs import get_logger

_LOG = get_logger(__name__)
_Profile = TypeVar("_Profile", bound=msgspec.Struct)
_FORMAT = 3
"""Raised when profiles are counted in another way, so that older files are measured again."""


def cache_folder(environment: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """Where this user's profiles are kept: `COTERIE_CACHE`, else the platform's own place for caches."""
    known = os.environ if environment is None else environment
    if chosen := known.get("COTERIE_CACHE"):
        return Path(chosen)
    if platform == "win32":
        local = known.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "coterie" / "cache"
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "coterie"
    xdg = known.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache") / "coterie"


def library_versions() -> dict[str, str]:
    """Versions of the packages that decide what a model costs, read without importing them."""
    found = {}
    for package in ("coterie", "peft", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def profile_key(kind: str, **facts: object) -> str:
    """A digest of `facts` (structs, mappings, sequences, plain values), the library versions and the profile format."""
    everything = {"kind": kind, "format": _FORMAT, "libraries": library_versions(), "facts": facts}
    return hashlib.sha256(msgspec.json.encode(everything, order="deterministic")).hexdigest()


class ProfileCache:
    """JSON files in one folder, one per key."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() / "profiles" if folder is None else folder

    def read(self, key: str, kind: type[_Profile]) -> _Profile | None:
        """The profile under `key`; None if there is none or its file is damaged: then measure and rewrite."""
        path = self._path(key)
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _LOG.warning("the cached profile %s cannot be used (%s); measuring again", path, error)
            return None

    def write(self, key: str, profile: msgspec.Struct) -> None:
        """Keep `profile` under `key`. A reader sees the old file or the whole new one, never a part.

        Raises:
            StorageError: The folder cannot be written.
        """
        path = self._path(key)
        encoded = msgspec.json.format(msgspec.json.encode(profile))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(encoded)
                Path(temporary).replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
        except OSError as error:
            raise StorageError(
                f"the profile cache {self.folder} cannot be written: {error}",
                hint="free some disk space, or set COTERIE_CACHE to a writable folder",
            ) from error

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
