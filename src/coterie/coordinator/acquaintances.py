"""Writes down which devices join a run and what they can do. A list that cannot be written costs a log line, no run."""

import re
from collections.abc import Iterable

from coterie.clock import Clock
from coterie.config.recipe import ClusterSection
from coterie.coordinator.device_list import DeviceList, KnownDevice
from coterie.coordinator.member import Member
from coterie.errors import StorageError
from coterie.logs import get_logger
from coterie.profiles.cluster_profile import DeviceProfile

log = get_logger(__name__)

_UNNAMED = re.compile(r"local-\d+")


class Acquaintances:
    """See the module.

    Args:
        devices: The list.
        cluster: Workers that the run itself starts here are no devices; their names are in it.
        clock: Tells the date.
    """

    def __init__(self, devices: DeviceList, cluster: ClusterSection, clock: Clock) -> None:
        self._devices = devices
        self._cluster = cluster
        self._clock = clock

    def met(self, members: Iterable[Member]) -> None:
        """These have joined."""
        now_s = self._clock.wall()
        for member in members:
            hello = member.hello
            if not hello.identity or self._is_emulated(hello.name):
                continue
            device = KnownDevice(
                identity=hello.identity,
                name=hello.name,
                first_seen_s=now_s,
                last_seen_s=now_s,
                device_type=hello.device_type,
                threads=hello.threads,
                memory_bytes=hello.memory_bytes,
                package_version=hello.package_version,
            )
            try:
                self._devices.saw(device)
            except StorageError as error:
                log.warning("%s", error.message)

    def measured(self, member: Member, profile: DeviceProfile) -> None:
        """This one was measured."""
        try:
            self._devices.measured(
                member.hello.identity,
                flops_per_s=profile.flops_per_s,
                memory_bytes=profile.memory_bytes,
                at_s=profile.measured_at_s,
            )
        except StorageError as error:
            log.warning("%s", error.message)

    def _is_emulated(self, name: str) -> bool:
        """Whether it is a worker process that the run started on the coordinator's machine."""
        local = self._cluster.effective_local_workers
        named = {worker.name for worker in local}
        return name in named or (None in named and _UNNAMED.fullmatch(name) is not None)
