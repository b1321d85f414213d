"""Rows with named fields: JSON Lines, and rows in memory (dictionaries, a `datasets.Dataset`)."""

from collections.abc import Iterable, Mapping, Sequence

from coterie.errors import DataError
from coterie.tasks.readers.json_rows import json_lines
from coterie.tasks.readers.options import Column, RawSentence, ReadOptions, find_column

WORD_FIELDS = ("tokens", "words")
TAG_FIELDS = ("ner_tags", "tags", "labels", "ner")


def _field(record: Mapping[str, object], wanted: Column, usual: Sequence[str], where: str) -> object:
    name = find_column(list(record), wanted, usual)
    if name is None:
        looked_for = repr(wanted) if wanted is not None else " or ".join(usual)
        found = ", ".join(record) or "none"
        raise DataError(
            f"{where}: has no field {looked_for}; its fields: {found}",
            hint="say which fields hold words and tags (text_column, label_column), or name the task that these data "
            "are for, such as --task sequence-classification",
        )
    return record[name]


def _words(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise DataError(f"{where}: the words are not a list of strings", hint='write them like ["EU", "rejects"]')
    return tuple(value)


def _tag(value: object, names: Sequence[str], where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"{where}: {value!r} is not a tag", hint="a tag is a string, or an integer with `label_names`")
    if not names:
        raise DataError(f"{where}: the tags are integers and nothing says what they mean", hint="give `label_names`")
    if not 0 <= value < len(names):
        raise DataError(f"{where}: the tag {value} is outside the {len(names)} label names", hint="check `label_names`")
    return names[value]


def sentence_from_record(record: object, line: int, where: str, options: ReadOptions) -> RawSentence:
    """A sentence from one row.

    Raises:
        DataError: It is no row of named fields, a field is missing or of the wrong kind, or the tags are not as many
            as the words.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{where}: is not a row of named fields (a JSON object, a dictionary)",
            hint='a row looks like {"tokens": ["EU"], "ner_tags": ["B-ORG"]}',
        )
    words = _words(_field(record, options.text_column, WORD_FIELDS, where), where)
    lines = (line,) * len(words)
    if not options.tagged:
        return RawSentence(words=words, tags=(), lines=lines)
    value = _field(record, options.label_column, TAG_FIELDS, where)
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{where}: the tags are not a list", hint="one tag for each word")
    tags = tuple(_tag(tag, options.label_names, where) for tag in value)
    if len(tags) != len(words):
        raise DataError(f"{where}: {len(words)} words but {len(tags)} tags", hint="one tag for each word")
    return RawSentence(words=words, tags=tags, lines=lines)


def read_records(records: Iterable[object], source: str, options: ReadOptions) -> list[RawSentence]:
    """The sentences of rows in memory; the message of an error counts rows from 0."""
    return [sentence_from_record(record, 0, f"{source}, row {index}", options) for index, record in enumerate(records)]


def read_jsonl(text: str, source: str, options: ReadOptions) -> list[RawSentence]:
    """The sentences of a JSON Lines file: one object a line, blank lines skipped.

    Raises:
        DataError: A line is not a JSON object or not a tagged sentence; `source` and line are named.
    """
    return [
        sentence_from_record(record, line, f"{source}:{line}", options) for line, record in json_lines(text, source)
    ]
