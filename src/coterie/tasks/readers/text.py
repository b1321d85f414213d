"""Text files, checked before anything is made of them: encoding, NUL bytes, line ends."""

import codecs
from pathlib import Path

from coterie.errors import DataError, RecipeError


def read_text(path: Path, encoding: str) -> str:
    """The whole text of a file, a byte order mark removed, line ends as they are.

    Raises:
        DataError: It cannot be opened, is in another encoding, or holds NUL bytes.
        RecipeError: No such encoding is known.
    """
    try:
        codec = codecs.lookup(encoding).name
    except LookupError:
        raise RecipeError(f"the encoding {encoding!r} is not known", hint="the usual ones: utf-8, cp1252") from None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if codec == "utf-8":
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{path}: is UTF-16 text", hint='save it as UTF-8, or say encoding = "utf-16"')
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode(codec)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not valid {encoding}",
            hint='save the file as UTF-8, or state its encoding (encoding = "cp1252" for many older files)',
        ) from error
    nul = text.find("\0")
    if nul >= 0:
        line = text.count("\n", 0, nul) + 1
        raise DataError(f"{path}:{line}: a NUL byte: the file is damaged or not text", hint="fetch the file again")
    return text


def unreadable(path: Path, error: OSError) -> DataError:
    """What is said of a file or folder that the system does not open."""
    return DataError(f"{path}: cannot be read: {error.strerror or error}", hint="check the path")


def split_lines(text: str) -> list[str]:
    r"""The lines of a text, split at `\n` only; a `\r` before it is removed.

    `str.splitlines` would also split at U+2028, U+0085 and others, which stand inside words and JSON strings.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    return lines
