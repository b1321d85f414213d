"""A source of measurements that this machine does not have."""

import msgspec


class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """In place of a source: why there is none."""

    reason: str
