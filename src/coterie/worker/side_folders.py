"""Where a server keeps what: a cache for each model, choice of layers and tokens; a state for each run."""

import hashlib
from pathlib import Path

import msgspec

from coterie.sidetuning.cache_layout import CacheLayout

_DIGITS = 16


def cache_folder(folder: Path, layout: CacheLayout) -> Path:
    """The folder of a cache: the same for every run that can use the same activations."""
    digest = hashlib.sha256(msgspec.json.encode(layout, order="deterministic")).hexdigest()
    return folder / f"cache-{digest[:_DIGITS]}"
