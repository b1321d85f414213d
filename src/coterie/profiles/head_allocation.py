"""Which backend of a device computes which heads and neurons of a layer (made by `planner.head_allocation`)."""

import msgspec

from coterie.profiles.backend_profile import Strategy


class PartShare(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's share of a part.

    Attributes:
        backend: Name.
        count: KV groups or neurons; never 0 (a backend without a share is not listed).
        strategy: Whether it computes them at once or one by one.
        predicted_s: Seconds of forward, backward and transfers.
    """

    backend: str
    count: int
    strategy: Strategy = "fused"
    predicted_s: float


class PartAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Who computes one part (the heads, or the neurons) of every layer; counts add up to the layer's.

    Attributes:
        shares: In the order in which heads (neurons) are dealt out, and in which parts are summed.
        predicted_s: The slowest share's seconds.
        best_single_s: Seconds of the fastest backend alone.
        best_single: Its name.
        left_out: Backends without a share, with the reason in words and numbers.
    """

    shares: tuple[PartShare, ...]
    predicted_s: float
    best_single_s: float
    best_single: str
    left_out: dict[str, str] = {}


class HeadAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """The allocation of one device: the same for each of its layers of one shape. None: that part is not split."""

    attention: PartAllocation | None = None
    neurons: PartAllocation | None = None
