"""Finds the line on which a key of a TOML file stands, for error messages. `tomllib` keeps no positions."""

import re

_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_\-\".\s]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\"'.]+(?:\s*\.\s*[A-Za-z0-9_\-\"']+)*)\s*=")
_TRIPLE = re.compile(r'"""|\'\'\'')


def key_lines(text: str) -> dict[str, int]:
    """Line numbers, from 1, of dotted keys and section names; the tables `[[a.b]]` count as `a.b[0]`, `a.b[1]`."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    section = ""
    inside_text = False
    for number, line in enumerate(text.split("\n"), start=1):
        opens_or_closes = len(_TRIPLE.findall(line)) % 2 == 1
        if inside_text:
            inside_text = not opens_or_closes
            continue
        inside_text = opens_or_closes
        if header := _HEADER.match(line):
            section = _plain(header[2])
            if header[1] == "[[":
                index = counts.setdefault(section, 0)
                counts[section] += 1
                lines.setdefault(section, number)
                section = f"{section}[{index}]"
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            name = _plain(key[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
    return lines


def _plain(name: str) -> str:
    return re.sub(r"[\s\"']", "", name)
