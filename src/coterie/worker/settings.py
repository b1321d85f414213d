"""What the owner of a device decides about its worker."""

from pathlib import Path

import msgspec

from coterie.jobs.roles import WorkerRole
from coterie.profiles.cluster_profile import DeviceType
from coterie.profiles.head_allocation import HeadAllocation
from coterie.transport.user_settings import IN_MEMORY


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
        identity: A file with the device's key, or `memory` for one that is gone with the process; empty: the user's.
        allocation: Who computes which heads and neurons; None: whatever is fastest (for comparisons, as cuts are).
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
    identity: str = IN_MEMORY
    allocation: HeadAllocation | None = None

    @property
    def shares_layers(self) -> bool:
        """Whether more than torch on the processor may compute them."""
        return self.backends != ("torch",)
