"""The splits of a run's data: those that are named, and those that lie beside the training data."""

from coterie.errors import DataError
from coterie.tasks.readers.options import DataSource
from coterie.tasks.sources import has_split
from coterie.tasks.task import DataFiles


def split_sources(files: DataFiles) -> dict[str, DataSource]:
    """The source of every split that there is, by name, `train` first.

    Raises:
        DataError: Nothing is given at all.
    """
    found: dict[str, DataSource] = {}
    for name in ("train", "dev", "test"):
        source = getattr(files, name)
        if source is None and files.train is not None and has_split(files.train, name, files.options):
            source = files.train
        if source is not None:
            found[name] = source
    if not found:
        raise DataError("no data are given", hint="name a file or folder with training data")
    return found


def is_beside(files: DataFiles, name: str) -> bool:
    """Nobody named this split: it was found beside the training data."""
    return name != "train" and getattr(files, name) is None
