"""The version of what coordinator and workers say to each other, and how two ends of different ones tell."""

from typing import Final

import msgspec

WIRE_VERSION: Final = 5
"""Raised with every change of `coterie.cluster.messages` that an older peer would misread."""


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """What a hello of every version says, past and future: the rest of it may be anything."""

    type: str
    wire_version: int
    package_version: str
    name: str


_DECODER = msgspec.msgpack.Decoder(Versions)


def versions_of(body: bytes) -> Versions | None:
    """The versions that a hello names, whatever else it holds; None: the bytes are no hello of any version."""
    try:
        versions = _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return versions if versions.type == "Hello" else None
