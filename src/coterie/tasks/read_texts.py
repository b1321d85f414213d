"""Texts and pairs of texts with an answer each (a label, a score): all splits of a run, as strings and raw answers."""

from collections.abc import Mapping, Sequence

import msgspec

from coterie.errors import DataError
from coterie.tasks.readers.options import DataSource, ReadOptions
from coterie.tasks.rows import RowFile, read_rows, text_of
from coterie.tasks.splits import is_beside, split_sources
from coterie.tasks.task import DataFiles
from coterie.tasks.text_columns import TextColumns, absent_column, find_columns


class TextFile(msgspec.Struct, frozen=True, kw_only=True):
    """One split's rows, checked as far as they are text.

    Attributes:
        file: The rows as they were read; for lines, and for what class labels mean.
        columns: Which were read.
        texts: The text of each row, and the second one of a pair.
        answers: What each row has in the column of the answers; None where there is none.
    """

    file: RowFile
    columns: TextColumns
    texts: tuple[tuple[str, str | None], ...]
    answers: tuple[object, ...]

    @property
    def source(self) -> str:
        """Where the rows came from, in words."""
        return self.file.source


class TextSplits(msgspec.Struct, frozen=True, kw_only=True):
    """The splits that have answers, or were asked for; `notes` says which others were left out."""

    files: dict[str, TextFile]
    notes: tuple[str, ...]


def read_text_splits(files: DataFiles, answers: Sequence[str]) -> TextSplits:
    """Read every split that is named, and those beside the training data that have a column with answers.

    Args:
        files: Where the splits are.
        answers: Usual names of the column with the answers.

    Raises:
        DataError: A split cannot be read or understood, or has no answers though it was named.
    """
    read: dict[str, TextFile] = {}
    notes: list[str] = []
    for name, source in split_sources(files).items():
        found = _read(source, name, files.options, answers)
        if found.columns.answer is None and files.options.tagged:
            if not is_beside(files, name):
                raise absent_column(found.file, None, answers[:4], "label_column")
            notes.append(left_out(name, found))
            continue
        read[name] = found
    return TextSplits(files=read, notes=tuple(notes))


def left_out(name: str, file: TextFile) -> str:
    """What is said of a split beside the training data that has no answers (as GLUE's test data)."""
    return f"{file.source}: the {name} data have no answers and are left out"


def _read(source: DataSource, split: str, options: ReadOptions, answers: Sequence[str]) -> TextFile:
    file = read_rows(source, split=split, options=options)
    columns = find_columns(file, options, answers)
    texts: list[tuple[str, str | None]] = []
    for index, row in enumerate(file.rows):
        where = file.where(index)
        pair = None if columns.pair is None else _text(row.fields, columns.pair, where)
        texts.append((_text(row.fields, columns.text, where), pair))
    raw = tuple(None if columns.answer is None else row.fields.get(columns.answer) for row in file.rows)
    return TextFile(file=file, columns=columns, texts=tuple(texts), answers=raw)


def _text(fields: Mapping[str, object], column: str, where: str) -> str:
    if column not in fields:
        raise DataError(f"{where}: has no field {column!r}", hint="every row needs its text")
    return text_of(fields[column], where, f"the field {column!r}")
