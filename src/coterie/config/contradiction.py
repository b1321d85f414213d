"""One thing in a recipe that excludes another, or makes no sense beside it."""

import msgspec


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, at which key; `others` are further keys that the sentence relies on."""

    key: str
    text: str
    others: tuple[str, ...] = ()
