"""What sharing a block takes of the worker process's memory beyond the block: copies of weights, and their gradients.

Not counted are what backends keep between a forward and its backward beyond what torch's own block keeps (attention
probabilities, where torch's fused attention keeps none), and the memory of child processes and of accelerators.
"""

from collections.abc import Iterator, Sequence
from math import prod

from coterie.backends.backend import BackendInfo
from coterie.backends.checks import weight_shapes
from coterie.backends.shares import Shape
from coterie.heads.dealing import count_of, part_shape
from coterie.heads.shapes import BlockShapes
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation, PartShare

_FLOAT32_BYTES = 4


def shared_memory(
    shapes: BlockShapes, allocation: HeadAllocation, infos: Sequence[BackendInfo], *, trains_weights: bool
) -> SharedMemory:
    """What each block of these shapes takes more.

    Args:
        shapes: A block's parts.
        allocation: Who computes how much of them.
        infos: The backends, which say how often they copy weights.
        trains_weights: Whether weights get gradients, which come in parts and are joined to the layer's.
    """
    parts = list(_parts(shapes, allocation))
    times = {info.name: info.weight_copies for info in infos}
    copies = sum(
        _share_bytes(shape, share, times.get(share.backend, 0)) for shape, part in parts for share in part.shares
    )
    gradients = max((2 * _bytes(shape) for shape, part in parts if len(part.shares) > 1), default=0)
    return SharedMemory(copies=copies, working=gradients if trains_weights else 0)


def _parts(shapes: BlockShapes, allocation: HeadAllocation) -> Iterator[tuple[Shape, PartAllocation]]:
    """The parts that are shared as dealt out; others are left as they are."""
    for shape, part in ((shapes.attention, allocation.attention), (shapes.neurons, allocation.neurons)):
        if shape is not None and part is not None and sum(share.count for share in part.shares) == count_of(shape):
            yield shape, part


def _share_bytes(whole: Shape, share: PartShare, copies: int) -> int:
    """The weights of a share as its backend holds them, and the columns of the second product, cut out for it."""
    shape = part_shape(whole, share.count)
    sizes = weight_shapes(shape)
    cuts = (share.count < count_of(whole)) + (share.strategy == "each" and share.count > 1)
    second = prod(sizes["wo" if "wo" in sizes else "w2"])
    return copies * _bytes(shape) + cuts * second * _FLOAT32_BYTES


def _bytes(shape: Shape) -> int:
    return _FLOAT32_BYTES * sum(prod(size) for size in weight_shapes(shape).values())
