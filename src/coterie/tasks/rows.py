"""Any data source in, rows of named fields out: what tasks whose rows are texts are made of.

A table, JSON Lines, a list in JSON, plain text (a row a line, in the field `text`), a saved data set or one on the
hub, or rows in memory. Which field means what is the task's business.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from coterie.errors import DataError
from coterie.tasks.readers import hf_datasets
from coterie.tasks.readers.json_rows import read_json_rows, rows_in_memory
from coterie.tasks.readers.options import DataSource, FileFormat, ReadOptions
from coterie.tasks.readers.row import Row
from coterie.tasks.readers.tables import looks_like_header, read_table
from coterie.tasks.readers.text import read_text, split_lines
from coterie.tasks.sources import open_source, pick_split, refuse_binary, require_split_file, source_name

TEXT_FIELD = "text"
"""The field of a line of plain text."""

_SUFFIXES: Mapping[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}


class RowFile(msgspec.Struct, frozen=True, kw_only=True):
    """What was read from one source.

    Attributes:
        source: File or folder, or what the rows in memory are called.
        rows: All rows, in order; at least one.
        class_names: Of columns of class labels in a data set: what their integers mean.
    """

    source: str
    rows: tuple[Row, ...]
    class_names: Mapping[str, tuple[str, ...]] = {}

    def where(self, index: int) -> str:
        """File and line of a row, for messages."""
        line = self.rows[index].line
        return f"{self.source}:{line}" if line else f"{self.source}, row {index}"


def read_rows(source: DataSource, *, split: str = "train", options: ReadOptions | None = None) -> RowFile:
    """Read one split as rows of named fields.

    Args:
        source: A file, a folder of split files or made by `save_to_disk`, or rows in memory.
        split: `train`, `dev` or `test`: which one to take where the source holds several.
        options: How to read it; guessed by default. Of the columns only `label_column`, given by number, counts here:
            it tells a table without a header.

    Raises:
        DataError: The source cannot be read or understood, or is empty; file and line are named.
        MissingPackageError: It needs the package `datasets`, which is absent.
    """
    options = options or ReadOptions()
    opened = open_source(source, options)
    class_names: dict[str, tuple[str, ...]] = {}
    if isinstance(opened, Path):
        path = require_split_file(opened, split) if opened.is_dir() else opened
        name, rows = str(path), _read_file(path, options)
    else:
        name = source_name(source, split)
        chosen = pick_split(opened, split, name) if isinstance(opened, Mapping) else opened
        columns = getattr(chosen, "features", None) or ()
        class_names = {column: names for column in columns if (names := hf_datasets.label_names_of(chosen, column))}
        rows = rows_in_memory(chosen, name)
    if not rows:
        raise DataError(f"{name}: holds no row", hint="is it the right file, and whole?")
    return RowFile(source=name, rows=tuple(rows), class_names=class_names)


def _read_file(path: Path, options: ReadOptions) -> list[Row]:
    refuse_binary(path)
    text = read_text(path, options.encoding)
    match options.format if options.format != "auto" else _find_format(path, text):
        case "jsonl":
            return read_json_rows(text, str(path))
        case "csv":
            return read_table(text, str(path), options)
        case "datasets":
            raise DataError(f"{path}: is a file, not a folder made by `save_to_disk`", hint="give the folder")
        case "conll":
            raise DataError(
                f"{path}: CoNLL columns hold words with tags, not texts", hint="use JSON Lines, CSV or plain text"
            )
        case _:
            lines = enumerate(split_lines(text), start=1)
            return [Row(fields={TEXT_FIELD: line}, line=number) for number, line in lines if line.strip()]


def _find_format(path: Path, text: str) -> FileFormat:
    suffix = path.suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    if first.startswith("{") and first.endswith("}"):
        return "jsonl"
    return "csv" if looks_like_header(first) else "text"


def text_of(value: object, where: str, what: str) -> str:
    """A field's value as text for a tokenizer.

    Args:
        value: The field's value.
        where: File and line, for the message.
        what: What the field is, such as `the text`.

    Raises:
        DataError: It is no string, or one that no tokenizer takes.
    """
    if not isinstance(value, str):
        shown = "absent (null)" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
        raise DataError(f"{where}: {what} is {shown}, not a string", hint="is it the right column?")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{where}: half a surrogate pair in {what}", hint="write the file as UTF-8")
    return value
