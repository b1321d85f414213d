"""A first look at training data: which columns, what is in them, how long rows are. No task is assumed."""

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coterie.errors import DataError
from coterie.tasks.readers.csv_rows import find_delimiter
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.readers.text import read_text, split_lines
from coterie.tasks.sources import find_split_file, open_source, pick_split, refuse_binary, require_split_file
from coterie.tasks.tag_schemes import split_tag

ROWS_LOOKED_AT = 1000

_SHOWN_VALUE = 40
_DELIMITERS = ("\t", ",", ";")

Row = Mapping[str, object]
Layout = Literal["tagged words", "rows", "plain text"]


class DataLook(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rows show.

    Attributes:
        source: What the user named.
        layout: One tagged word a line (CoNLL, CSV with a sentence column), rows with named columns, or text.
        rows: The first rows; of plain text one row with the column `text` for each line that is not blank; none of
            tagged words, whose one meaning is clear.
        others: Files with dev and test data beside a training file; empty where the source holds its splits itself.
        longest_words: Words of the longest sentence of tagged words.
    """

    source: str
    layout: Layout
    rows: tuple[Row, ...] = ()
    others: dict[str, str] = {}
    longest_words: int = 0

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
        rows = pick_split(opened, "train", source) if isinstance(opened, Mapping) else opened
        first = tuple(dict(row) for row in itertools.islice(rows, ROWS_LOOKED_AT))
        return _checked(DataLook(source=source, layout="rows", rows=first))
    file = require_split_file(opened, "train") if opened.is_dir() else opened
    refuse_binary(file)
    found = _look_at_text(source, file, read_text(file, options.encoding))
    others = {} if opened.is_dir() else _neighbors(file)
    return _checked(msgspec.structs.replace(found, others=others))


def _checked(look: DataLook) -> DataLook:
    if not look.rows and look.layout != "tagged words":
        raise DataError(f"{look.source}: holds no row", hint="is it the right file, and whole?")
    return look


def _neighbors(file: Path) -> dict[str, str]:
    """Files beside `train.jsonl` that are named like its dev and test data and have the same ending."""
    if find_split_file(file.parent, "train") != file:
        return {}
    found = {split: find_split_file(file.parent, split) for split in ("dev", "test")}
    return {split: str(path) for split, path in found.items() if path is not None and path.suffix == file.suffix}


def _look_at_text(source: str, file: Path, text: str) -> DataLook:
    lines = split_lines(text)
    first = next((line for line in lines if line.strip()), "")
    suffix = file.suffix.lower()
    if not first:
        raise DataError(f"{source}: {file.name} is empty", hint="is it the right file, and whole?")
    if suffix in {".jsonl", ".ndjson", ".json"} or first.lstrip().startswith("{"):
        return DataLook(source=source, layout="rows", rows=tuple(_json_rows(lines, file)))
    if find_delimiter(first):
        return DataLook(source=source, layout="tagged words")
    if suffix in {".csv", ".tsv"}:
        return DataLook(source=source, layout="rows", rows=tuple(_csv_rows(text, file)))
    if suffix in {".conll", ".bio", ".iob", ".iob2"} or _is_tagged(lines):
        return DataLook(source=source, layout="tagged words", longest_words=_longest_block(lines))
    if suffix not in {"", ".txt", ".text", ".md"}:
        raise DataError(
            f"{file}: the format {suffix} is not known",
            hint="give JSON Lines (.jsonl), CSV (.csv), tagged words (.conll) or plain text (.txt)",
        )
    texts = tuple({"text": line} for line in itertools.islice(filter(str.strip, lines), ROWS_LOOKED_AT))
    return DataLook(source=source, layout="plain text", rows=texts)


def _json_rows(lines: Sequence[str], file: Path) -> Iterable[Row]:
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in itertools.islice(numbered, ROWS_LOOKED_AT):
        try:
            yield msgspec.json.decode(line.encode(), type=dict[str, object])
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            hint = "every line is one complete JSON object"
            if line.lstrip().startswith("["):
                hint += "; a list of objects is turned into such lines by `jq -c '.[]'`"
            raise DataError(f"{file}:{number}: no JSON object: {error}", hint=hint) from error


def _csv_rows(text: str, file: Path) -> Iterable[Row]:
    header = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(_DELIMITERS, key=header.count), strict=True)
    try:
        for row in itertools.islice(reader, ROWS_LOOKED_AT):
            yield {str(name).strip(): value for name, value in row.items() if name is not None}
    except csv.Error as error:
        raise DataError(
            f"{file}:{reader.line_num}: broken CSV: {error}", hint="a quote inside a quoted field is doubled"
        ) from error


def _is_tagged(lines: Sequence[str]) -> bool:
    """Every one of the first lines is blank or has several columns, the last of them an entity tag."""
    filled = [line.split() for line in itertools.islice(lines, ROWS_LOOKED_AT) if line.strip()]
    words = [columns for columns in filled if columns[0] not in {"-DOCSTART-", "#"}]
    return bool(words) and all(len(columns) > 1 and split_tag(columns[-1]) is not None for columns in words)


def _longest_block(lines: Iterable[str]) -> int:
    """Most lines between two blank ones."""
    blocks = itertools.groupby(lines, key=lambda line: bool(line.strip()))
    return max((len(list(block)) for filled, block in blocks if filled), default=0)


def _shown(row: Row) -> str:
    cells = (f"{name}={value!r}" for name, value in row.items())
    return ", ".join(cell if len(cell) <= _SHOWN_VALUE else f"{cell[: _SHOWN_VALUE - 1]}…" for cell in cells)
