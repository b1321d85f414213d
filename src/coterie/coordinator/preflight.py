"""Cheap checks of a recipe before torch is imported and before any worker is started. What opens a thing checks again.

Nobody should wait half a minute to be told of a misspelled path. Every function imports no torch.
"""

import errno
import os
from pathlib import Path

from coterie.checkpoint.names import checkpoint_folder, replica_folder, saved_steps
from coterie.config.recipe import ClusterSection, DataSection, Recipe
from coterie.coordinator.side_record import SIDE_RUN
from coterie.errors import CheckpointError, StorageError, UsageError
from coterie.jobs.model_folder import local_model
from coterie.tasks.readers.options import DataSource, ReadOptions
from coterie.tasks.sources import check_source
from coterie.transport.discovery import require_discovery
from coterie.transport.listening import check_port


def check_training(recipe: Recipe) -> None:
    """For `train`: data, model, run folder, port.

    Raises:
        CoterieError: What the run would end with, much later.
    """
    check_planning(recipe)
    check_run_folder(recipe)
    if recipe.cluster.announce:
        require_discovery()


def check_planning(recipe: Recipe) -> None:
    """For `plan`: data, model, port.

    Raises:
        CoterieError: What the command would end with, much later.
    """
    for split in ("train", "dev", "test"):
        source = getattr(recipe.data, split)
        if source is not None:
            check_source(source, split=split, options=read_options(recipe.data))
    local_model(recipe.model.name)
    _check_port(recipe.cluster)


def check_forward(recipe: Recipe, data: DataSource | None, split: str) -> None:
    """For `evaluate` and `predict`: data if they are read from files, model, port.

    Raises:
        CoterieError: What the command would end with, much later.
    """
    if data is not None:
        check_source(data, split=split, options=read_options(recipe.data))
    local_model(recipe.model.name)
    _check_port(recipe.cluster)


def check_run_folder(recipe: Recipe) -> None:
    """A resumed run needs a checkpoint, a fresh one must not fall into an old one's folder, both must be able to write.

    Raises:
        CheckpointError: There is no checkpoint to resume from.
        UsageError: There are an earlier run's checkpoints.
        StorageError: The folder cannot be written.
    """
    folder = Path(recipe.run.output)
    steps = saved_steps(checkpoint_folder(folder)) or saved_steps(replica_folder(folder))
    if recipe.train.mode == "side" and not steps:
        _check_side_folder(folder, resume=recipe.run.resume)
        return
    if recipe.run.resume and not steps:
        raise CheckpointError(
            f"{folder} holds no checkpoint to resume from",
            hint="give the run's folder by --output, or drop --resume",
        )
    if steps and not recipe.run.resume:
        raise UsageError(
            f"{folder} holds the checkpoints of an earlier run",
            hint="continue it with --resume, or give this run a folder of its own with --output",
        )
    _check_writable(folder)


def _check_side_folder(folder: Path, *, resume: bool) -> None:
    begun = (folder / SIDE_RUN).exists()
    if resume and not begun:
        raise CheckpointError(
            f"{folder} holds no side-tuning run to resume",
            hint="give the run's folder by --output, or drop --resume",
        )
    if begun and not resume:
        raise UsageError(
            f"{folder} holds an earlier side-tuning run",
            hint="continue it with --resume, or give this run a folder of its own with --output",
        )
    _check_writable(folder)


def cannot_write(path: Path, error: OSError) -> StorageError:
    """What is said of a run's folder or file that cannot be written."""
    return StorageError(f"cannot write {path}: {error.strerror or error}", hint="choose another folder with --output")


def read_options(data: DataSection, *, tagged: bool = True) -> ReadOptions:
    """How the recipe says that data files are to be read; `tagged`: they hold the answers."""
    return ReadOptions(
        format=data.format,
        text_column=data.text_column,
        pair_column=data.pair_column,
        label_column=data.label_column,
        sentence_column=data.sentence_column,
        label_names=data.label_names,
        encoding=data.encoding,
        tagged=tagged,
    )


def _check_writable(folder: Path) -> None:
    """Ask the nearest folder that exists; nothing is made."""
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    number = 0
    if not nearest.is_dir():
        number = errno.ENOTDIR
    elif not os.access(nearest, os.W_OK | os.X_OK):
        number = errno.EACCES
    if number:
        raise cannot_write(folder, OSError(number, os.strerror(number)))


def _check_port(cluster: ClusterSection) -> None:
    """A port that the user chose; a free one is chosen only when it is opened."""
    if cluster.port:
        check_port(cluster.listen_host, cluster.port)
