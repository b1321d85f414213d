"""Results of runs, a file each: a benchmark of hours can be stopped, go on, and show what it has so far.

A result is known by what it depends on (data set with its sizes and hyperparameters, variant, rank, seed); change one
of these, and it is run again. Code that changed is not noticed: take another folder.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from sidetuning_settings import SideSetting

Result = TypeVar("Result")


class Kept:
    """The results of one data set.

    Args:
        folder: Where they are kept; None to keep nothing.
        setting: The data set; part of every name.
        is_closed: Nothing is run: what is not kept is absent.
    """

    def __init__(self, folder: Path | None, setting: SideSetting, *, is_closed: bool) -> None:
        self._folder = folder
        self._is_closed = is_closed
        self._name = setting.name.replace(" ", "-")
        self._setting = hashlib.sha256(msgspec.json.encode(setting)).hexdigest()[:8]
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, kind: type[Result], what: str, run: Callable[[], Result]) -> Result | None:
        """The kept result, or what `run` gives, which is kept from then on; None if it may not run.

        Args:
            kind: Type of the result.
            what: Words and numbers that tell it from the set's other results.
            run: Makes it.
        """
        path = self._path(what)
        if path is not None and path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=kind)
        if self._is_closed:
            return None
        found = run()
        if path is not None:
            beside = path.with_suffix(".part")
            beside.write_bytes(msgspec.json.encode(found))
            beside.replace(path)
        return found

    def _path(self, what: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{self._name}-{self._setting}-{what.replace(' ', '-')}.json"
