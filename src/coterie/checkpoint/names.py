"""Where a run keeps its checkpoints, and which steps it has: what can be known without opening one. Needs no torch."""

import re
from pathlib import Path

PARTIAL = ".partial"
"""Ending of a folder that is still being written."""

REPLACED = ".replaced"
"""Ending of a folder that a new one of the same name is about to take the place of."""

STEP_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_folder(output: str | Path) -> Path:
    """Where the run in the folder `output` keeps its checkpoints."""
    return Path(output) / "checkpoints"


def replica_folder(output: str | Path) -> Path:
    """Where the run in the folder `output` keeps the last replicas of its trained state, in a checkpoint's form."""
    return Path(output) / "replica"


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:06d}"


def saved_steps(folder: Path) -> tuple[int, ...]:
    """Steps that have a checkpoint in `folder`, in order, whether whole or damaged. Changes nothing on the disk."""
    if not folder.is_dir():
        return ()
    names = (path.name.removesuffix(REPLACED) for path in folder.iterdir() if path.is_dir())
    return tuple(sorted({int(match.group(1)) for match in map(STEP_NAME.fullmatch, names) if match}))
