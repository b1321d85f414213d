"""Data sets of the Hugging Face `datasets` library: a folder made by `save_to_disk`, or an object in memory."""

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


def load_folder(folder: Path) -> Rows | Mapping[str, Rows]:
    """The data set in a folder, or its splits by name.

    Raises:
        MissingPackageError: The package `datasets` is not installed.
        DataError: The folder is damaged.
    """
    try:
        import datasets  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise MissingPackageError(
            f"{folder}: reading it needs the package `datasets`", hint='pip install "coterie[datasets]"'
        ) from error
    try:
        loaded: Rows | Mapping[str, Rows] = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: cannot be loaded: {error}", hint="save it again with `save_to_disk`") from error
    return loaded


def tag_names_of(rows: Rows, options: ReadOptions) -> tuple[str, ...]:
    """What the integers of the tag column mean, if its feature is a list of `ClassLabel`."""
    features = getattr(rows, "features", None) or {}
    name = find_column(list(features), options.label_column, TAG_FIELDS)
    names = getattr(getattr(features.get(name), "feature", None), "names", None)
    return tuple(names) if names else ()


def with_tag_names(rows: Rows, options: ReadOptions) -> ReadOptions:
    """The options, completed by what the data set knows about its tags; names that the user gave win."""
    names = options.tag_names or tag_names_of(rows, options)
    return msgspec.structs.replace(options, tag_names=names)
