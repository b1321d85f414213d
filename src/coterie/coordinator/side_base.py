"""In additive mode: the backbone's own logits of evaluated rows, kept in the run's folder.

They stay with the owner of the data, who adds the server's output to them; a resumed run needs no device for them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from coterie.checkpoint.sealed_tensors import DamagedError, read_sealed, write_sealed

SIDE_BASE = "side-base.safetensors"

Base = Mapping[str, Mapping[int, Tensor]]
"""By split and row, (M, C)."""


def write_base(folder: Path, base: Base) -> None:
    """Keep logits of all rows of some splits, whole or not at all.

    Raises:
        StorageError: The disk is full, or the folder cannot be written.
    """
    tensors = {}
    for split, rows in base.items():
        parts = [rows[row] for row in range(len(rows))]
        tensors[f"{split}/counts"] = torch.tensor([len(part) for part in parts])
        tensors[f"{split}/logits"] = torch.cat(parts)
    write_sealed(folder / SIDE_BASE, tensors)


def read_base(folder: Path) -> dict[str, dict[int, Tensor]]:
    """What is kept; nothing if there is no such file or it is damaged: then devices run these rows again."""
    try:
        tensors = read_sealed(folder / SIDE_BASE)
    except (OSError, DamagedError):
        return {}
    base = {}
    for name in tensors:
        split, _, kind = name.partition("/")
        if kind == "counts":
            parts = torch.split(tensors[f"{split}/logits"], tensors[name].tolist())
            base[split] = dict(enumerate(parts))
    return base
