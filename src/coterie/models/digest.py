"""Tells two sets of pretrained weights apart without reading all of them."""

import hashlib

from coterie.jobs.model_folder import GGUF
from coterie.models.source import ModelSource

_EDGE_BYTES = 1 << 20


def weights_digest(source: ModelSource) -> str:
    """A hash of each weight file's name, size, beginning and end: reading gigabytes would take minutes."""
    digest = hashlib.sha256()
    for path in [source.gguf_file] if source.gguf_file else sorted(source.folder.iterdir()):
        if path.suffix in {".safetensors", ".bin", GGUF}:
            with path.open("rb") as file:
                size = path.stat().st_size
                digest.update(f"{path.name} {size} ".encode())
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(size - _EDGE_BYTES, 0))
                digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()
