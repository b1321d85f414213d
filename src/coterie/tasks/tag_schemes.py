"""Ways to mark entities by one tag per word (IOB1, IOB2, IOBES, BILOU, BMES), all turned into IOB2.

Entities are read as the CoNLL evaluation script and seqeval's default mode read them: a tag that continues nothing
(an `I-` after `O`, or of another type) starts an entity. So every sequence has one meaning, and turning it into IOB2
keeps that meaning; a stray `I-` becomes `B-` and is counted, nothing is refused for it.
"""

from collections.abc import Iterable, Sequence

import msgspec

OUTSIDE = "O"

_ROLES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S"}
"""What each prefix says: begins, is inside, ends, is a single word. BILOU has L, U for E, S, and BMES M for I."""


class Entity(msgspec.Struct, frozen=True, kw_only=True):
    """Words `start` up to, not including, `stop` are one entity."""

    type: str
    start: int
    stop: int


def split_tag(tag: str) -> tuple[str, str] | None:
    """`(role, type)` of a tag, the role one of B I E S; `None` if it is neither `O` nor `PREFIX-TYPE`.

    `O` has the role `O` and the type "".
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, entity_type = tag.partition("-")
    if not dash or not entity_type or prefix not in _ROLES:
        return None
    return _ROLES[prefix], entity_type


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence, as seqeval's default mode finds them.

    Every tag must be one that `split_tag` understands.
    """
    found: list[Entity] = []
    open_type, start, closed = "", 0, True
    for index, tag in enumerate(tags):
        parts = split_tag(tag)
        assert parts is not None, f"{tag!r} was not checked when it was read"
        role, entity_type = parts
        continues = not closed and role in "IE" and entity_type == open_type
        if not continues:
            if open_type:
                found.append(Entity(type=open_type, start=start, stop=index))
            open_type, start = entity_type, index
        closed = role in "OES"
    if open_type:
        found.append(Entity(type=open_type, start=start, stop=len(tags)))
    return found


def to_iob2(tags: Sequence[str]) -> tuple[str, ...]:
    """The same entities written in IOB2."""
    result = [OUTSIDE] * len(tags)
    for entity in find_entities(tags):
        result[entity.start] = f"B-{entity.type}"
        result[entity.start + 1 : entity.stop] = [f"I-{entity.type}"] * (entity.stop - entity.start - 1)
    return tuple(result)


def name_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """The scheme that a file's tags follow: `IOB2`, `IOB1`, or `IOBES` (which stands for BILOU and BMES too).

    IOB1 writes `B-` only where an entity follows another of its type directly; a file with stray `I-` tags and any
    other `B-` is IOB2 with mistakes.
    """
    stray = needless_begin = False
    for tags in sentences:
        previous = ""
        for tag in tags:
            role, entity_type = split_tag(tag) or (OUTSIDE, "")
            if role in "ES" or tag.startswith("M-"):
                return "IOBES"
            stray |= role == "I" and entity_type != previous
            needless_begin |= role == "B" and entity_type != previous
            previous = entity_type
    return "IOB1" if stray and not needless_begin else "IOB2"


def label_set(tags: Iterable[str]) -> tuple[str, ...]:
    """`O`, then `B-X` and `I-X` for every entity type X that occurs, types sorted.

    Both tags of a type are in the set even if one never occurs, so that every entity can be predicted whole.
    """
    types = sorted({tag.partition("-")[2] for tag in tags if tag != OUTSIDE})
    return (OUTSIDE, *(f"{prefix}-{entity_type}" for entity_type in types for prefix in "BI"))
