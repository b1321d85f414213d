"""What a data set writes as an answer (a string, an integer, a class number, a number), as a label or a score."""

import math
import re
from collections.abc import Iterable, Sequence

from coterie.errors import DataError
from coterie.tasks.read_texts import TextFile

_INTEGER = re.compile(r"[+-]?\d+(?:\.0+)?")
_GENERIC = re.compile(r"LABEL_\d+")
_LARGEST_FLOAT32 = 3.4028234e38
_NO_CLASS = -1
"""What the hub's data sets write where the class is kept secret (GLUE's test data)."""


def labels_of(file: TextFile, names: Sequence[str]) -> tuple[str | None, ...]:
    """The label of every row; None where the row has none.

    Args:
        file: The rows.
        names: What integers mean; where there are none, an integer is its own name.

    Raises:
        DataError: A value is no label.
    """
    # Where annotators did not agree, SNLI and MNLI write a dash.
    dash = "-" if file.columns.answer == "gold_label" else None
    found = []
    for index, value in enumerate(file.answers):
        label = _label(value, names, file, index)
        found.append(None if label == dash else label)
    return tuple(found)


def _label(value: object, names: Sequence[str], file: TextFile, index: int) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        text = value.strip()
        if not names or text in names or not _INTEGER.fullmatch(text):
            return text or None
        value = int(float(text))
    if isinstance(value, int):
        return _named(value, names, file.file.where(index)) if names else str(value)
    if isinstance(value, float):
        raise DataError(
            f"{file.file.where(index)}: the label {value} is a number with a fraction",
            hint='learn numbers with task = "regression"',
        )
    raise DataError(
        f"{file.file.where(index)}: {str(value)[:60]!r} is not a label",
        hint="a label is a string or an integer, one a row (several labels a row cannot be learnt)",
    )


def _named(value: int, names: Sequence[str], where: str) -> str | None:
    if value == _NO_CLASS:
        return None
    if not 0 <= value < len(names):
        raise DataError(
            f"{where}: the label {value} is outside the {len(names)} label names", hint="check `label_names`"
        )
    return names[value]


def label_order(labels: Iterable[str | None], source: str) -> tuple[str, ...]:
    """The distinct labels in the order of their ids: integers by value, anything else by the alphabet.

    Raises:
        DataError: There are fewer than two, or they are numbers with fractions.
    """
    distinct = sorted({label for label in labels if label is not None})
    if len(distinct) < 2:
        found = f"only the label {distinct[0]!r}" if distinct else "no label at all"
        raise DataError(f"{source}: holds {found}", hint="two labels at least; is it the right `label_column`?")
    if all(_INTEGER.fullmatch(label) for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (float(label), label)))
    if all(_number(label) is not None for label in distinct):
        raise DataError(
            f"{source}: the labels are numbers with fractions, such as {distinct[0]} and {distinct[-1]}",
            hint='learn numbers with task = "regression"',
        )
    return tuple(distinct)


def are_integers(labels: Sequence[str]) -> bool:
    """Some label is an integer, so that an integer in the data may be one by its own name."""
    return any(_INTEGER.fullmatch(label) for label in labels)


def are_generic(labels: Sequence[str]) -> bool:
    """The labels are those of a model whose labels nobody has named: `LABEL_0`, `LABEL_1`."""
    return bool(labels) and all(_GENERIC.fullmatch(label) for label in labels)


def scores_of(file: TextFile) -> tuple[float | None, ...]:
    """The score of every row; None where the row has none.

    Raises:
        DataError: A value is no number, or infinite.
    """
    return tuple(_score(value, file.file.where(index)) for index, value in enumerate(file.answers))


def _score(value: object, where: str) -> float | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    number = _number(value)
    if number is None or abs(number) > _LARGEST_FLOAT32:
        raise DataError(
            f"{where}: {str(value)[:60]!r} is not a score",
            hint='a score is a finite number; learn names with task = "sequence-classification"',
        )
    return None if math.isnan(number) else number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
