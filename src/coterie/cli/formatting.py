"""What verbs share to print results: one JSON object, or plain aligned text."""

from collections.abc import Iterable

import msgspec


def print_json(value: object) -> None:
    """Print `value` (structs, dicts, tuples, numbers, text) as one line of JSON."""
    print(msgspec.json.encode(value).decode())


def aligned(rows: Iterable[tuple[str, ...]], *, indent: int = 2, gap: int = 2) -> str:
    """Rows of text with each column as wide as its widest cell; the last column is not padded."""
    table = [tuple(row) for row in rows]
    columns = max((len(row) for row in table), default=0)
    widths = [max((len(row[column]) for row in table if column < len(row)), default=0) for column in range(columns)]
    lines = []
    for row in table:
        cells = [cell.ljust(widths[column]) for column, cell in enumerate(row)]
        lines.append(" " * indent + (" " * gap).join(cells).rstrip())
    return "\n".join(lines)
