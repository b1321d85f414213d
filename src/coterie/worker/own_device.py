"""What a worker computes with: measured when a run asks for it, and shared among backends where that is faster."""

from collections.abc import Callable

from coterie.cluster.messages import Profiled, ProfileRequest
from coterie.ids import WorkerId
from coterie.measure.allocator import free_memory
from coterie.measure.process_memory import renew_memory_limit
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.model_profile import ModelProfile
from coterie.transport.identity import open_identity
from coterie.worker.device import measured_device
from coterie.worker.settings import WorkerSettings
from coterie.worker.shard_cache import ShardCache
from coterie.worker.sharing import DeviceSharing


class OwnDevice:
    """This device and its compute backends, for as long as the worker's process lives.

    Args:
        settings: The owner's.
        say: Tells the device's owner something.
    """

    def __init__(self, settings: WorkerSettings, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.say = say
        self.identity = open_identity(settings.identity or None)
        self.shards = None if settings.shard_cache is None else ShardCache(settings.shard_cache, settings.shard_quota)
        self._sharing: DeviceSharing | None = None
        self._shares_at: Callable[[int], bool] = lambda _rows: False
        self.model: ModelProfile | None = None
        """What the run's model takes, once the coordinator has asked how fast this device is on it."""
        self.shared_memory = SharedMemory()
        """What sharing a block among backends takes more."""

    def measured(self, request: ProfileRequest, worker: WorkerId) -> Profiled:
        """What this device can do; takes its time. Backends are looked for only where they may take part."""
        if self._sharing is None and self.settings.shares_layers:
            self._sharing = DeviceSharing(self.settings, self.say)
        measured = measured_device(self.settings, request, worker, sharing=self._sharing)
        self._shares_at = measured.profile.shares_at
        self.model, self.shared_memory = request.model, measured.profile.shared_memory
        return measured

    def sharing_at(self, rows: int) -> DeviceSharing | None:
        """Its compute backends, if they are to share layers in micro-batches of `rows` rows."""
        return self._sharing if self._shares_at(rows) else None

    def free_memory(self) -> None:
        """Give back what a stage has left; a limit that is enforced on this process counts from there."""
        free_memory()
        if self.settings.enforce_memory and self.settings.memory_bytes:
            renew_memory_limit(self.settings.memory_bytes)

    def close(self) -> None:
        """End all backends, and let another worker use the identity. Idempotent."""
        self.identity.close()
        if self._sharing is not None:
            self._sharing.close()
