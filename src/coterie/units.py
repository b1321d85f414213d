"""SI units in and out. Inside the project a number is bytes or seconds; only this module formats and parses."""

import re

MIB = 1024**2
GIB = 1024**3

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `600MiB`, `1.5 GiB`, `2GB` or `4096`.

    Raises:
        ValueError: The text is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 600MiB or 1.5GiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])


def format_bytes(count: float) -> str:
    """`count` bytes as people read them: `812 B`, `3.4 KiB`, `599 MiB`, `1.72 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            digits = 0 if unit == "B" or abs(size) >= 100 else (1 if abs(size) >= 10 else 2)
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """`seconds` as people read them: `3.1 ms`, `2.40 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_rate(bytes_per_s: float) -> str:
    """A link's rate in Mbit/s, as networks are sold."""
    return f"{bytes_per_s * 8 / 1e6:.3g} Mbit/s"
