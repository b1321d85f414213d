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
        # What is trained on the device does not depend on how side-tuning is done, nor the other way round.
        fields = msgspec.to_builtins(setting)
        self._of_side = _hash({name: value for name, value in fields.items() if not name.startswith("local_")})
        self._of_local = _hash({name: fields[name] for name in fields if name not in {"epochs", "learning_rate"}})
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
        is_local = any(method in what for method in ("lora", "bitfit"))
        setting = self._of_local if is_local else self._of_side
        return self._folder / f"{self._name}-{setting}-{what.replace(' ', '-')}.json"


def _hash(fields: dict[str, object]) -> str:
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:8]
