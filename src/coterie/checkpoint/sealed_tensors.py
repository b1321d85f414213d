"""Tensors in one small file: whole or absent, and a damaged one is told from a right one by a digest among them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from coterie.checkpoint.durable import storage_errors, sync_folder, write_file

_SEAL = "sha256"


class DamagedError(Exception):
    """The file is not as it was written; the text says in what."""


def write_sealed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors in the place of those before; a write that fails leaves nothing beside them.

    Raises:
        StorageError: The disk is full, or the folder cannot be written.
    """
    content = save({**tensors, _SEAL: _digest(tensors)})
    partial = path.with_name(f"{path.name}.partial")
    with storage_errors(path.parent, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_file(partial, content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)  # on a full disk it would take the room that something else needs
            raise
        sync_folder(path.parent)


def read_sealed(path: Path) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        DamagedError: They are not those that were written.
        OSError: The file is absent or cannot be read.
    """
    content = path.read_bytes()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise DamagedError(str(error)) from error
    seal = tensors.pop(_SEAL, None)
    if seal is None or not torch.equal(seal, _digest(tensors)):
        raise DamagedError("its checksum does not match")
    return tensors


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """The SHA-256 of the file that the tensors alone would make, (32,) uint8."""
    return torch.tensor(list(hashlib.sha256(save(dict(tensors))).digest()), dtype=torch.uint8)
