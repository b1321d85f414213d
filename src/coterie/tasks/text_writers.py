"""Texts with their labels or scores out, in formats that the readers take, and as plain answers, one a line."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coterie.errors import StorageError
from coterie.tasks.examples import LabelledText, ScoredText
from coterie.tasks.writers import check_suffix

TEXT_SUFFIXES = (".txt", ".jsonl", ".csv")
"""The formats: `.txt` holds the answers alone, a line each."""

AnsweredText = LabelledText | ScoredText


def answer_of(row: AnsweredText) -> str | float | None:
    """The label or the score."""
    return row.label if isinstance(row, LabelledText) else row.score


def answer_lines(rows: Sequence[AnsweredText]) -> str:
    """For people: the answer, a tab, the text, and of a pair a tab and the second text; each row on one line."""
    lines = []
    for row in rows:
        texts = (row.text,) if row.pair is None else (row.text, row.pair)
        lines.append("\t".join((_shown(row), *(" ".join(text.split()) for text in texts))) + "\n")
    return "".join(lines)


def write_answers(path: Path, rows: Sequence[AnsweredText]) -> None:
    """Write rows in the format that the file's name says.

    Raises:
        UsageError: The name ends in no known suffix.
        StorageError: The file cannot be written.
    """
    check_suffix(path, TEXT_SUFFIXES)
    match path.suffix.lower():
        case ".jsonl":
            text = "".join(msgspec.json.encode(_fields(row)).decode() + "\n" for row in rows)
        case ".csv":
            text = _csv(rows)
        case _:
            text = "".join(f"{_shown(row)}\n" for row in rows)
    try:
        path.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}", hint="choose another path"
        ) from error


def _fields(row: AnsweredText) -> dict[str, object]:
    texts: dict[str, object] = {"text": row.text}
    if row.pair is not None:
        texts["pair"] = row.pair
    return texts | {"label" if isinstance(row, LabelledText) else "score": answer_of(row)}


def _csv(rows: Sequence[AnsweredText]) -> str:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    for index, row in enumerate(rows):
        fields = _fields(row)
        if index == 0:
            writer.writerow(fields)
        writer.writerow("" if value is None else value for value in fields.values())
    return out.getvalue()


def _shown(row: AnsweredText) -> str:
    """The answer on one line."""
    answer = answer_of(row)
    if isinstance(answer, float):
        return f"{answer:.6g}"
    return "" if answer is None else " ".join(answer.split())
