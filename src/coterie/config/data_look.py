"""A first look at training data: which columns, what is in them, how long rows are. No task is assumed."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coterie.errors import DataError
from coterie.tasks.readers.csv_rows import find_delimiter
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.readers.tables import looks_like_header
from coterie.tasks.readers.text import read_text, split_lines
from coterie.tasks.rows import read_rows
from coterie.tasks.sources import find_split_file, open_source, refuse_binary, require_split_file
from coterie.tasks.tag_schemes import split_tag

ROWS_LOOKED_AT = 1000

_SHOWN_VALUE = 40

ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TAG_SUFFIXES = (".conll", ".bio", ".iob", ".iob2")
TEXT_SUFFIXES = ("", ".txt", ".text", ".md")

Row = Mapping[str, object]
Layout = Literal["tagged words", "rows", "plain text"]


class DataLook(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rows show.

    Attributes:
        source: What the user named.
        layout: One tagged word a line (CoNLL, CSV with a sentence column), rows with named columns, or text.
        rows: The first rows; of plain text a row with the column `text` for each document; none of tagged words, whose
            one meaning is clear.
        others: Files with dev and test data beside a training file; empty where the source holds its splits itself.
        longest_words: Words of the longest sentence of tagged words.
        named_columns: Columns of class numbers whose names the data set itself knows.
    """

    source: str
    layout: Layout
    rows: tuple[Row, ...] = ()
    others: dict[str, str] = {}
    longest_words: int = 0
    named_columns: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, in the order in which they come up."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    def values(self, column: str) -> tuple[object, ...]:
        """What the rows have in one column; rows without it are left out."""
        return tuple(row[column] for row in self.rows if row.get(column) is not None)

    def describe(self) -> str:
        """One line for people."""
        if self.layout == "tagged words":
            return f"{self.source}: tagged words, a line each"
        if self.layout == "plain text":
            return f"{self.source}: plain text"
        return f"{self.source}: rows with the columns {', '.join(self.columns)}; first row: {_shown(self.rows[0])}"


def look_at_data(source: str, options: ReadOptions | None = None) -> DataLook:
    """Read the first rows of training data.

    Args:
        source: A file, a folder with a file per split, or a folder made by `save_to_disk`.
        options: Encoding and format, where they are not the usual ones.

    Raises:
        DataError: There is nothing there, it holds no row, or its format is not known.
    """
    options = options or ReadOptions()
    opened = open_source(source, options)
    if not isinstance(opened, Path):
        return _rows(source, options)
    file = require_split_file(opened, "train") if opened.is_dir() else opened
    refuse_binary(file)
    found = _look_at_file(source, file, options)
    others = {} if opened.is_dir() else _neighbors(file)
    return msgspec.structs.replace(found, others=others)


def _rows(source: str, options: ReadOptions) -> DataLook:
    read = read_rows(source, options=options)
    rows = tuple(row.fields for row in read.rows[:ROWS_LOOKED_AT])
    return DataLook(source=source, layout="rows", rows=rows, named_columns=tuple(read.class_names))


def _neighbors(file: Path) -> dict[str, str]:
    """Files beside `train.jsonl` that are named like its dev and test data and have the same ending."""
    if find_split_file(file.parent, "train") != file:
        return {}
    found = {split: find_split_file(file.parent, split) for split in ("dev", "test")}
    return {split: str(path) for split, path in found.items() if path is not None and path.suffix == file.suffix}


def _look_at_file(source: str, file: Path, options: ReadOptions) -> DataLook:
    lines = split_lines(read_text(file, options.encoding))
    first = next((line for line in lines if line.strip()), "")
    suffix = file.suffix.lower()
    if not first:
        raise DataError(f"{source}: {file.name} is empty", hint="is it the right file, and whole?")
    if find_delimiter(first):
        return DataLook(source=source, layout="tagged words")
    if suffix in ROW_SUFFIXES or first.lstrip().startswith(("{", "[{")) or looks_like_header(first):
        return _rows(source, options)
    if suffix in TAG_SUFFIXES or _is_tagged(lines):
        return DataLook(source=source, layout="tagged words", longest_words=max(map(len, _blocks(lines)), default=0))
    if suffix not in TEXT_SUFFIXES:
        raise DataError(
            f"{file}: the format {suffix} is not known",
            hint="give JSON Lines (.jsonl), CSV (.csv), tagged words (.conll) or plain text (.txt)",
        )
    texts = (["\n".join(block) for block in _blocks(lines)] if "" in map(str.strip, lines) else lines)[:ROWS_LOOKED_AT]
    return DataLook(source=source, layout="plain text", rows=tuple({"text": text} for text in texts))


def _is_tagged(lines: Sequence[str]) -> bool:
    """Every one of the first lines is blank or has several columns, the last of them an entity tag."""
    filled = [line.split() for line in itertools.islice(lines, ROWS_LOOKED_AT) if line.strip()]
    words = [columns for columns in filled if columns[0] not in {"-DOCSTART-", "#"}]
    return bool(words) and all(len(columns) > 1 and split_tag(columns[-1]) is not None for columns in words)


def _blocks(lines: Iterable[str]) -> list[list[str]]:
    """The lines between blank ones."""
    return [list(block) for filled, block in itertools.groupby(lines, lambda line: bool(line.strip())) if filled]


def _shown(row: Row) -> str:
    cells = (f"{name}={value!r}" for name, value in row.items())
    return ", ".join(cell if len(cell) <= _SHOWN_VALUE else f"{cell[: _SHOWN_VALUE - 1]}…" for cell in cells)
