"""A join link as a QR code of half blocks, for the camera of a phone."""

import shutil
from typing import TextIO

import segno

from coterie.units import counted

QUIET_MODULES = 2
"""Light modules around the code: half of what the standard asks for, enough for cameras, and narrower."""

_BLACK_ON_WHITE = "\x1b[38;5;16;48;5;231m"
_RESET = "\x1b[0m"
_HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def qr_text(text: str, stream: TextIO) -> str:
    """The code to print on `stream`, or a sentence why it is not printed.

    On a terminal it is black on white whatever the terminal's colours are: many cameras read no inverted code. In a
    file blocks are the dark modules, for black on white paper.
    """
    rows = half_block_rows(text)
    width = len(rows[0])
    if stream.isatty():
        columns = shutil.get_terminal_size().columns
        if columns < width:
            return (
                f"(no QR code: it is {width} columns wide, this terminal has {counted(columns, 'column')}; "
                f"widen it and start again, or copy the link)"
            )
        rows = [f"{_BLACK_ON_WHITE}{row}{_RESET}" for row in rows]
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        "▀▄█".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return f"(no QR code: this terminal's encoding, {encoding}, has no blocks; copy the link)"
    return "\n".join(rows)


def half_block_rows(text: str) -> list[str]:
    """Lines of equal length, two rows of modules in each: a block is dark, a blank light."""
    matrix = segno.make(text, error="l", micro=False).matrix_iter(border=QUIET_MODULES)
    modules = [[bool(module) for module in row] for row in matrix]
    if len(modules) % 2:
        modules.append([False] * len(modules[0]))
    return [
        "".join(_HALVES[pair] for pair in zip(above, below, strict=True))
        for above, below in zip(modules[::2], modules[1::2], strict=True)
    ]
