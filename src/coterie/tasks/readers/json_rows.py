"""JSON in: one object a line (JSON Lines), or one list of objects."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from coterie.errors import DataError
from coterie.tasks.readers.row import Row
from coterie.tasks.readers.text import split_lines


def json_lines(text: str, source: str) -> Iterator[tuple[int, object]]:
    """Line number and value of every line that is not blank.

    Raises:
        DataError: A line is not JSON; `source` and line are named.
    """
    for number, line in enumerate(split_lines(text), start=1):
        if line.strip():
            yield number, _decode(line, f"{source}:{number}", "every line is one complete JSON object")


def read_json_rows(text: str, source: str) -> list[Row]:
    """The rows of a JSON Lines file, or of a file that is one list of objects (whose rows have no lines).

    Raises:
        DataError: The text is no JSON, or a row is no object; file and line are named.
    """
    if text.lstrip().startswith("["):
        values = _decode(text, source, "the file is one complete list of JSON objects, or one object a line")
        assert isinstance(values, list), "JSON that starts with a bracket is a list"
        return rows_in_memory(values, source)
    return [Row(fields=_object(value, f"{source}:{line}"), line=line) for line, value in json_lines(text, source)]


def rows_in_memory(values: Iterable[object], source: str) -> list[Row]:
    """Rows that are objects already; the message of an error counts them from 0."""
    return [Row(fields=_object(value, f"{source}, row {index}")) for index, value in enumerate(values)]


def _decode(text: str, where: str, hint: str) -> object:
    try:
        value: object = msgspec.json.decode(text.encode("utf-8"))
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON: {error}", hint=hint) from error
    return value


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where}: is not a row of named fields (a JSON object, a dictionary)",
            hint='a row looks like {"text": "I like it", "label": "positive"}',
        )
    return value
