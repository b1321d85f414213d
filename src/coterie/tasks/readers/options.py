"""How a data source is to be read, and the raw sentences that every reader gives."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coterie.errors import RecipeError

FileFormat = Literal["auto", "conll", "jsonl", "csv", "datasets", "text"]

DataSource = str | Path | Sequence[Mapping[str, object]] | Mapping[str, Sequence[Mapping[str, object]]]
"""A file, a folder, or rows in memory: dictionaries, a `datasets.Dataset`, or a dictionary of such by split."""

Column = int | str | None
"""An index (negative counts from the end), a name, or the usual place."""


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a data source; the defaults guess.

    Attributes:
        format: `auto` goes by the file's name and first lines.
        text_column: Where the text, or the words, are. In a CoNLL file, whose columns have no names, it is an index
            (first: 0).
        pair_column: Where the second text of a pair is.
        label_column: Where the labels are (in a CoNLL file by default the last).
        sentence_column: In CSV with a word a row: which sentence a word belongs to.
        label_names: What integer labels mean, in order.
        encoding: Of text files.
        tagged: The data holds the answers; false for data that a model is only to answer.
    """

    format: FileFormat = "auto"
    text_column: Column = None
    pair_column: Column = None
    label_column: Column = None
    sentence_column: Column = None
    label_names: tuple[str, ...] = ()
    encoding: str = "utf-8"
    tagged: bool = True


def column_index(column: Column, default: int) -> int:
    """The index of a column in a format whose columns have no names.

    Raises:
        RecipeError: The column is given by a name.
    """
    if isinstance(column, str):
        raise RecipeError(
            f"the column {column!r} is given by a name, but columns of a CoNLL file have none",
            hint="give its index: 0 is the first, -1 the last",
        )
    return default if column is None else column


class RawSentence(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence with its tags as the file writes them; `lines` holds the line of each word (or of the row)."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    lines: tuple[int, ...]


class SentenceCollector:
    """Collects words, read one by one, into sentences."""

    def __init__(self) -> None:
        self.done: list[RawSentence] = []
        self._words: list[str] = []
        self._tags: list[str] = []
        self._lines: list[int] = []

    @property
    def is_open(self) -> bool:
        """A sentence has begun and not ended."""
        return bool(self._words)

    def add(self, word: str, tag: str | None, line: int) -> None:
        """Add a word to the open sentence; where nothing is tagged, `tag` is `None`."""
        self._words.append(word)
        self._lines.append(line)
        if tag is not None:
            self._tags.append(tag)

    def finish(self) -> None:
        """End the open sentence, if one is open."""
        if self._words:
            self.done.append(RawSentence(words=tuple(self._words), tags=tuple(self._tags), lines=tuple(self._lines)))
        self._words, self._tags, self._lines = [], [], []


def find_column(names: Sequence[str], wanted: Column, usual: Sequence[str]) -> str | None:
    """The name among `names` that was asked for, or else the first that is usual, upper and lower case alike."""
    by_lower = {name.strip().lower(): name for name in reversed(names)}
    if isinstance(wanted, int):
        return names[wanted] if -len(names) <= wanted < len(names) else None
    if wanted is not None:
        return by_lower.get(wanted.strip().lower())
    return next((by_lower[name] for name in usual if name in by_lower), None)
