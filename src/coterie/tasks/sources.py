"""Where data are: a file, a folder with a file per split, a saved data set, a name on the hub, or rows in memory."""

from collections.abc import Mapping
from pathlib import Path

from coterie.errors import DataError
from coterie.tasks.readers import hf_datasets
from coterie.tasks.readers.options import DataSource, ReadOptions
from coterie.tasks.readers.text import unreadable

SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "dev": ("dev", "validation", "valid", "val", "testa", "dev_matched", "validation_matched"),
    "test": ("test", "testb", "test_matched"),
}
"""The words under which data sets keep each split; where there are two kinds (MNLI's), the matched one."""

Opened = Path | hf_datasets.Rows | Mapping[str, hf_datasets.Rows]


def find_split_file(folder: Path, split: str) -> Path | None:
    """The file of a split in a folder of such files, such as `train.conll`; `None` if there is none.

    Raises:
        DataError: Several files could be meant.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise unreadable(folder, error) from error
    found = [path for path in files if path.name.partition(".")[0].lower() in SPLIT_NAMES[split]]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder}: {names} could all be the {split} data", hint="name the file itself")
    return found[0] if found else None


def require_split_file(folder: Path, split: str) -> Path:
    """The file of a split in a folder of such files.

    Raises:
        DataError: There is none, or several files could be meant.
    """
    file = find_split_file(folder, split)
    if file is None:
        raise DataError(
            f"{folder}: holds no {split} data",
            hint=f"a folder holds files such as train.jsonl and dev.jsonl ({', '.join(SPLIT_NAMES[split])})",
        )
    return file


def open_source(source: DataSource, options: ReadOptions) -> Opened:
    """A file or folder of files as a path, everything else as rows or as splits of rows."""
    if not isinstance(source, str | Path):
        return source
    path = Path(source)
    if hf_datasets.is_datasets_folder(path) or (options.format == "datasets" and not path.is_file()):
        return hf_datasets.load_data_set(str(source))
    return path


def pick_split(splits: Mapping[str, hf_datasets.Rows], split: str, source: str) -> hf_datasets.Rows:
    """The rows of one split.

    Raises:
        DataError: There is no such split.
    """
    name = next((name for name in SPLIT_NAMES[split] if name in splits), None)
    if name is None:
        raise DataError(f"{source}: has no {split} split; its splits: {', '.join(splits)}", hint="name another source")
    return splits[name]


def source_name(source: DataSource, split: str) -> str:
    """What messages call a source."""
    return str(source) if isinstance(source, str | Path) else f"the {split} rows in memory"


def has_split(source: DataSource, split: str, options: ReadOptions) -> bool:
    """The source is one of several splits and holds this one (a file or plain rows hold only themselves)."""
    opened = open_source(source, options)
    if isinstance(opened, Path):
        return opened.is_dir() and find_split_file(opened, split) is not None
    return isinstance(opened, Mapping) and any(name in opened for name in SPLIT_NAMES[split])


def check_source(source: DataSource, *, split: str, options: ReadOptions) -> None:
    """Is there something to open? Asked early, where reading would first load libraries that take seconds.

    Raises:
        DataError: No such file, or the folder holds no such split.
    """
    if not isinstance(source, str | Path):
        return
    path = Path(source)
    if hf_datasets.is_datasets_folder(path) or options.format == "datasets":
        return
    file = require_split_file(path, split) if path.is_dir() else path
    try:
        file.open("rb").close()
    except OSError as error:
        raise unreadable(file, error) from error


def refuse_binary(path: Path) -> None:
    """Refuse formats that only the `datasets` library reads, with what to do.

    Raises:
        DataError: It is such a file.
    """
    if path.suffix.lower() in {".parquet", ".arrow"}:
        raise DataError(
            f"{path}: this format is not read directly",
            hint="load it with the `datasets` library and save it with `save_to_disk`",
        )
