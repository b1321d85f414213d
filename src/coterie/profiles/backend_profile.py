"""What one device's compute backends do in how many seconds: the figures behind an allocation (METHODS 1.3)."""

from typing import Literal

import msgspec

Strategy = Literal["fused", "each"]
"""All heads of a share in one computation, or head by head."""

Part = Literal["attention", "neurons"]


class ShareTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds of one share on one backend: forward, backward and every transfer.

    Attributes:
        count: KV groups, or feed-forward neurons.
        seconds: Of the faster strategy.
        strategy: Which one that is.
        fused_s: All at once.
        each_s: One group after another; None where it was not tried.
    """

    count: int
    seconds: float
    strategy: Strategy = "fused"
    fused_s: float
    each_s: float | None = None


class BackendProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's timings, by rising count.

    Attributes:
        name: The backend's, as in `BackendInfo`.
        device: What its driver calls the device.
        attention: By KV groups, 1 to all of a layer; empty if it computes no heads.
        neurons: By feed-forward neurons, a grid that ends with all of a layer; seconds between are interpolated.
        notes: Why a part was not, or not wholly, measured.
        threads: Threads of the processor that it computes with; 0: none, or nobody knows.
    """

    name: str
    device: str
    attention: tuple[ShareTiming, ...] = ()
    neurons: tuple[ShareTiming, ...] = ()
    notes: dict[Part, str] = {}
    threads: int = 0


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """What backends take while they work side by side, as they do in a run: they share caches, memory and cores.

    Attributes:
        part: What they computed.
        backends: Who could have had a share.
        slowed: Of those that had one, how many times as long as alone it took.
    """

    part: Part
    backends: tuple[str, ...]
    slowed: dict[str, float]


class DeviceBackends(msgspec.Struct, frozen=True, kw_only=True):
    """All backends of a device at one layer's shapes.

    Attributes:
        key: Changes when what was measured changes: shapes, backends, drivers, threads.
        groups: KV groups of a layer; 0 if its attention cannot be split.
        neurons: Feed-forward neurons of a layer; 0 if they cannot be split.
        rows: B of the measurement.
        tokens: T of the measurement.
        backends: Each with its timings.
        cores: Usable cores of the processor; 0 if nobody knows.
        together: Of the groups of backends that were tried side by side.
        dealing_s: Seconds that a part costs beside its shares when several backends have one: cutting what goes in,
            joining what comes out.
    """

    key: str
    groups: int
    neurons: int
    rows: int
    tokens: int
    backends: tuple[BackendProfile, ...]
    cores: int = 0
    together: tuple[Together, ...] = ()
    dealing_s: dict[Part, float] = {}
