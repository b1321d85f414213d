"""What a worker says, made fit for a terminal and a log: its words are shown, and it need not mean well."""

import re
from typing import TypeVar

import msgspec

MOST_CHARACTERS = 1000

_T = TypeVar("_T")

# Escape sequences move the cursor and paint; marks of direction make a text read as another.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def plain_words(value: _T) -> _T:
    """A message with every text in it, at any depth, on one line, without control characters and of bearable length."""
    if isinstance(value, str):
        return _plain(value)  # type: ignore[return-value] # a str is what came in
    if isinstance(value, msgspec.Struct):
        found = {name: getattr(value, name) for name in value.__struct_fields__}
        changed = {name: new for name, old in found.items() if (new := plain_words(old)) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        parts = tuple(plain_words(part) for part in value)
        return parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value  # type: ignore[return-value] # as above
    if isinstance(value, dict):
        pairs = {plain_words(key): plain_words(old) for key, old in value.items()}
        same = len(pairs) == len(value) and all(pairs.get(key) is old for key, old in value.items())
        return value if same else pairs  # type: ignore[return-value] # as above
    return value


def _plain(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        text = text[: MOST_CHARACTERS - 1] + "…"
    return _UNSEEN.sub(" ", text) if _UNSEEN.search(text) else text
