"""Tables in: CSV with any usual delimiter, and tab-separated files with or without quotes and header."""

import csv
import io
from collections.abc import Iterator, Sequence

import msgspec

from coterie.errors import DataError
from coterie.tasks.readers.options import ReadOptions
from coterie.tasks.readers.row import Row
from coterie.tasks.readers.text import split_lines

_DELIMITERS = (",", "\t", ";")
_COLA_HEADER = ("source", "label", "star", "sentence")
"""CoLA's training and development files have these four columns and do not say so."""
_HEADER_WORDS = frozenset(
    {
        *("label", "labels", "gold_label", "quality", "score", "is_duplicate", "text", "sentence", "sentence1"),
        *("sentence2", "question", "question1", "question2", "premise", "hypothesis", "prompt", "response"),
        *("instruction", "output", "dialogue", "summary"),
    }
)


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    cells: tuple[str, ...]
    line: int


def looks_like_header(line: str) -> bool:
    """Of a file whose name says nothing: its first line names at least two columns that data sets usually have."""
    return any(
        len(_HEADER_WORDS & {cell.strip().strip('"').lower() for cell in line.split(delimiter)}) >= 2
        for delimiter in _DELIMITERS
    )


def read_table(text: str, source: str, options: ReadOptions) -> list[Row]:
    """The rows of a table whose first line names its columns (or is known to name none, as CoLA's).

    Raises:
        DataError: A row has another number of fields than the header, or quotes are broken; file and line are named.
    """
    first = next((line for line in split_lines(text) if line.strip()), "")
    # Of a table without a header the first line is a sentence, with as many commas as it likes.
    delimiter = "\t" if "\t" in first else max(_DELIMITERS, key=first.count)
    records = _tab_records(text, source) if delimiter == "\t" else list(_quoted(text, source, delimiter))
    if not records:
        return []
    header, body = _header(records, options)
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{source}:{records[0].line}: two columns are called {twice!r}", hint="rename one of them")
    for record in body:
        if len(record.cells) != len(header):
            hint = "check its quotes" if delimiter != "\t" else "a tab within a field must not be"
            raise DataError(
                f"{source}:{record.line}: has {len(record.cells)} fields, the header {len(header)}", hint=hint
            )
    return [Row(fields=dict(zip(header, record.cells, strict=True)), line=record.line) for record in body]


def _header(records: Sequence[_Record], options: ReadOptions) -> tuple[tuple[str, ...], Sequence[_Record]]:
    first = tuple(cell.strip() for cell in records[0].cells)
    if len(first) == len(_COLA_HEADER) and first[1] in {"0", "1"} and first[2] in {"", "*"}:
        return _COLA_HEADER, records
    column = options.label_column
    if isinstance(column, int) and -len(first) <= column < len(first):
        later = {record.cells[column].strip() for record in records[1:] if len(record.cells) == len(first)}
        if first[column] in later:  # the name of a column is not one of the answers in it
            return tuple(f"column {index}" for index in range(len(first))), records
    return first, records[1:]


def _tab_records(text: str, source: str) -> list[_Record]:
    """With quotes as they are, as GLUE's files have them, or as marks around fields where a program wrote them so.

    A sentence may itself begin and end with a quote. So quotes are marks if writing what they enclose gives the same
    file again, or if the lines make no even table otherwise (a line end within quotes).
    """
    lines = enumerate(split_lines(text), start=1)
    plain = [_Record(cells=tuple(line.split("\t")), line=number) for number, line in lines if line.strip()]
    if '"' not in text:
        return plain
    try:
        quoted = list(_quoted(text, source, "\t"))
    except DataError:
        return plain
    is_even = len({len(record.cells) for record in plain}) == 1
    return quoted if not is_even or _is_rewritten(quoted, text) else plain


def _is_rewritten(records: Sequence[_Record], text: str) -> bool:
    """A program that quotes what needs quotes, or everything, would write these records as this text."""
    rows = [record.cells for record in records]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        out = io.StringIO(newline="")
        csv.writer(out, delimiter="\t", lineterminator="\n", quoting=quoting).writerows(rows)
        if out.getvalue().rstrip("\n") == text.replace("\r\n", "\n").strip("\n"):
            return True
    return False


def _quoted(text: str, source: str, delimiter: str) -> Iterator[_Record]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    start = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield _Record(cells=tuple(cells), line=start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{source}:{reader.line_num}: broken CSV: {error}", hint="a quote inside a quoted field is doubled"
        ) from error
