"""What every record is."""

import msgspec


def _tag(class_name: str) -> str:
    return class_name.removesuffix("Record").lower()


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_tag):
    """Base of the union. `at_s` is the date in seconds since 1970; the event log fills it in where it is 0."""

    at_s: float = 0.0
