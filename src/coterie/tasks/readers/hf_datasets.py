"""Data sets of the Hugging Face `datasets` library: a saved folder, a name on the hub, or an object in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from coterie.errors import DataError, MissingPackageError
from coterie.tasks.readers.options import ReadOptions, find_column
from coterie.tasks.readers.records import TAG_FIELDS

Rows = Sequence[Mapping[str, object]]


def is_datasets_folder(folder: Path) -> bool:
    """The folder was made by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_data_set(name: str) -> Rows | Mapping[str, Rows]:
    """The data set, or its splits, in a folder made by `save_to_disk` or under a name that `datasets` knows.

    A name on the hub is downloaded once, into the library's own cache.

    Raises:
        MissingPackageError: The package `datasets` is not installed.
        DataError: There is no such data set, it is damaged, or it cannot be fetched.
    """
    try:
        import datasets  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise MissingPackageError(
            f"{name}: reading it needs the package `datasets`", hint='pip install "coterie[datasets]"'
        ) from error
    load = datasets.load_from_disk if is_datasets_folder(Path(name)) else datasets.load_dataset
    try:
        loaded: Rows | Mapping[str, Rows] = load(name)
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{name}: `datasets` cannot load it: {reason}",
            hint="check the name, or the folder that `save_to_disk` made",
        ) from error
    return loaded


def label_names_of(rows: Rows, column: str | None) -> tuple[str, ...]:
    """What the integers of a column mean, if its feature is a `ClassLabel` or a list of such."""
    feature = (getattr(rows, "features", None) or {}).get(column)
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return tuple(names) if names else ()


def with_label_names(rows: Rows, options: ReadOptions) -> ReadOptions:
    """The options, completed by what the data set knows about its tags; names that the user gave win."""
    features = getattr(rows, "features", None) or {}
    column = find_column(list(features), options.label_column, TAG_FIELDS)
    names = options.label_names or label_names_of(rows, column)
    return msgspec.structs.replace(options, label_names=names)
