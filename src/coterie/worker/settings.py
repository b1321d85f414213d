"""What the owner of a device decides about its worker."""

from pathlib import Path

import msgspec

from coterie.jobs.roles import WorkerRole
from coterie.profiles.cluster_profile import DeviceType
from coterie.profiles.head_allocation import HeadAllocation
from coterie.transport.user_settings import IN_MEMORY
from coterie.units import GIB
from coterie.worker.conditions import OwnerConditions

MIN_BATTERY = 0.2
"""Charge at which a worker leaves unless its owner says otherwise: a phone below it warns its owner."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `coterie worker`.

    Attributes:
        name: What to call the device in tables.
        memory_bytes: Most that the worker process may use in all; None: what is free.
        enforce_memory: Make allocations beyond that fail, where the system can.
        speed: Share of a core's speed; below 1 the compute thread sleeps so that wall time = CPU time / speed.
        threads: Compute threads.
        device_type: Where the stage runs.
        direct_links: Listen for the stage before this one; off, everything goes through the coordinator.
        measure_again: Do not use what an earlier run has measured of this device.
        backends: Compute backends to share each layer among, by name; `auto`: all there are. Torch alone: no sharing.
        role: Runs layers of the model, or is the server that trains a side network.
        cache_folder: Where a server keeps activations and its state; None: in memory, gone when it ends.
        shard_cache: Where frozen tensors are kept that were received; None: nowhere.
        shard_quota: Most bytes to keep there.
        identity: A file with the device's key, or `memory` for one that is gone with the process; empty: the user's.
        terms: When the worker must leave, how much of the processor it may take, and whether it yields.
        battery: Where to ask about the battery: `auto`, `none`, or `simulated:…` (see `measure.simulated_battery`).
        watts: What the device draws beyond idling while it computes, used where nothing measures it; None: a usual
            figure.
        memory_file: A file with a size that limits the worker's memory while it exists; read anew all the time.
        keep_awake: Keep the machine from going to sleep while the worker has layers.
        allocation: Who computes which heads and neurons; None: whatever is fastest (for comparisons, as cuts are).
        waits: Wait for a coordinator that is not there yet, for as long as it takes.
        parent: Process of the coordinator, if that started this worker: when it is gone nobody waits for it. 0: it did
            not.
    """

    name: str
    memory_bytes: int | None = None
    enforce_memory: bool = False
    speed: float = 1.0
    threads: int = 1
    device_type: DeviceType = "cpu"
    direct_links: bool = True
    measure_again: bool = False
    backends: tuple[str, ...] = ("torch",)
    role: WorkerRole = "device"
    cache_folder: Path | None = None
    shard_cache: Path | None = None
    shard_quota: int = 20 * GIB
    identity: str = IN_MEMORY
    terms: OwnerConditions = OwnerConditions(min_battery=MIN_BATTERY)
    battery: str = "auto"
    watts: float | None = None
    memory_file: Path | None = None
    keep_awake: bool = True
    allocation: HeadAllocation | None = None
    waits: bool = False
    parent: int = 0

    @property
    def full_speed(self) -> float:
        """Share of a core's speed while the owner does not work: what is measured and planned with."""
        return self.speed * self.terms.share

    @property
    def shares_layers(self) -> bool:
        """Whether more than torch on the processor may compute them."""
        return self.backends != ("torch",)
