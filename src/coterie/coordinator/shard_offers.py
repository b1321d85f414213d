"""Which of a unit's tensors a worker need not be sent, as it has kept them from an earlier run or joining."""

import hashlib
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from coterie.cluster.messages import PARAMETER
from coterie.cluster.shard_messages import ShardOffer, ShardPart
from coterie.tensors.codecs import encode
from coterie.transport.frame import Buffer, TensorSpec
from coterie.transport.wire import flat_view
from coterie.units import MIB

LEAST_UNIT_BYTES = MIB
"""Of frozen tensors in a unit: below that, asking takes longer than sending."""
LEAST_PART_BYTES = 32 * 1024
"""Of one tensor: thousands of small files would be slower than the network."""
PIECE_BYTES = 32 * MIB
"""Of one frame to a worker that keeps shards: what has come before a link breaks is kept, piece by piece."""

Parts = list[tuple[TensorSpec, Buffer]]


def encoded(tensors: Mapping[str, Tensor]) -> Parts:
    """The tensors as they travel; nothing is copied."""
    return [encode(tensor, name, "raw") for name, tensor in tensors.items()]


def offer_of(unit: int, parts: Parts, trained: Collection[str]) -> ShardOffer | None:
    """The offer of what training never changes; None where there is too little of it. Takes its time: it hashes.

    Args:
        unit: Which one.
        parts: All its tensors, encoded.
        trained: Names of parameters that are trained: a run's own, never to be kept on another's disk.
    """
    frozen = [
        (spec, buffer)
        for spec, buffer in parts
        if spec.name.startswith(PARAMETER)
        and spec.name.removeprefix(PARAMETER) not in trained
        and spec.nbytes >= LEAST_PART_BYTES
    ]
    if sum(spec.nbytes for spec, _ in frozen) < LEAST_UNIT_BYTES:
        return None
    return ShardOffer(
        unit=unit,
        parts=tuple(
            ShardPart(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.shape,
                nbytes=spec.nbytes,
                digest=hashlib.sha256(flat_view(buffer)).hexdigest(),
            )
            for spec, buffer in frozen
        ),
    )


def pieces(parts: Parts) -> Iterator[Parts]:
    """The tensors in groups of at most `PIECE_BYTES`, a larger one alone; one empty group if there are none."""
    piece: Parts = []
    nbytes = 0
    for part in parts:
        if piece and nbytes + part[0].nbytes > PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
        piece.append(part)
        nbytes += part[0].nbytes
    yield piece
