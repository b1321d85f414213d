"""SI units in and out. Inside the project a number is bytes or seconds; only this module formats and parses."""

import re

MIB = 1024**2
GIB = 1024**3

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)bit/s\s*$", re.IGNORECASE)
_SECONDS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*$", re.IGNORECASE)
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


def parse_memory(text: str) -> int:
    """Bytes of a worker's memory: a size, but a small number without a unit is a unit forgotten, not bytes.

    Raises:
        ValueError: The text is not a size, or no process fits into it because its unit is absent.
    """
    size = parse_bytes(text)
    if 0 < size < MIB and text.strip().isdecimal():
        raise ValueError(f"{text.strip()!r} would be {size} bytes; did you mean {text.strip()}MiB?")
    return size


def parse_rate(text: str) -> float:
    """Bytes per second of a link's rate such as `100Mbit/s`, or `12MB/s` and `12MiB/s`.

    Raises:
        ValueError: The text is not a rate, or it is 0.
    """
    match = _RATE.match(text)
    rate = 0.0
    if match is not None:
        rate = float(match[1]) * 1000 ** _POWERS[match[2].lower()] / 8
    elif text.rstrip().endswith("B/s"):
        rate = float(parse_bytes(text.rstrip().removesuffix("/s")))
    if rate <= 0:
        raise ValueError(f"{text!r} is not a rate; write it like 100Mbit/s or 12MB/s")
    return rate


def parse_seconds(text: str) -> float:
    """Seconds of a time such as `5ms`, `0.2 s` or `300us`.

    Raises:
        ValueError: The text is not a time.
    """
    match = _SECONDS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; write it like 5ms or 0.2s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2].lower()]


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


def format_joules(joules: float) -> str:
    """`joules` as people read them: `85 J`, `1.23 kJ`, `4.5 Wh` (a phone's battery holds about 15 Wh)."""
    if joules < 1000:
        return f"{joules:.3g} J" if joules < 100 else f"{joules:.0f} J"
    return f"{joules / 1000:.3g} kJ" if joules < 10_000 else f"{joules / 3600:.3g} Wh"


def format_rate(bytes_per_s: float) -> str:
    """A link's rate in bits, as networks are sold: `94.3 Mbit/s`, `1.14 Gbit/s`."""
    mbit_per_s = bytes_per_s * 8 / 1e6
    if round(mbit_per_s) < 1000:
        return f"{mbit_per_s:.3g} Mbit/s"
    gbit_per_s = mbit_per_s / 1000
    return f"{gbit_per_s:.{2 if gbit_per_s < 10 else 1 if gbit_per_s < 100 else 0}f} Gbit/s"


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: `1 stage`, `2 stages`; `plural` where an s is not enough."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def name_units(first_unit: int, stop_unit: int, units: int) -> str:
    """A stage's units in words: `embedding, blocks 0-3`, `block 4`, `blocks 5-11, output layer`."""
    names = ["embedding"] if first_unit == 0 else []
    first_block, last_block = max(first_unit, 1) - 1, min(stop_unit, units - 1) - 2
    if first_block == last_block:
        names.append(f"block {first_block}")
    elif first_block < last_block:
        names.append(f"blocks {first_block}-{last_block}")
    if stop_unit == units and units > 1:
        names.append("output layer")
    return ", ".join(names)
