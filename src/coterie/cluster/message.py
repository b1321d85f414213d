"""What every control message is."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of the union in `coterie.cluster.messages`; its subclasses' names are the tags."""
