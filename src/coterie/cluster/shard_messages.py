"""The words by which frozen tensors that a device has on disk need not travel again."""

import msgspec

from coterie.cluster.message import Message


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """One frozen tensor: its name as it travels, what its raw bytes mean, and their SHA-256 in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


class ShardOffer(Message, frozen=True, kw_only=True):
    """Coordinator to a worker that keeps shards: what a unit holds that training never changes, before it is sent."""

    unit: int
    parts: tuple[ShardPart, ...]


class ShardWants(Message, frozen=True, kw_only=True):
    """The answer: the names of those parts that are to be sent; it has the others. Parts not offered come in any case.

    `WEIGHTS` frames with all that is sent of the unit follow, in as many pieces as the coordinator likes.
    """

    unit: int
    names: tuple[str, ...]


ShardMessage = ShardOffer | ShardWants
