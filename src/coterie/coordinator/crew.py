"""What is known of the devices of a run that goes on: profiles, links, speeds measured since, limits set since."""

from collections.abc import Collection

import msgspec

from coterie.cluster.energy import BatterySample
from coterie.ids import WorkerId
from coterie.planner import capacity
from coterie.planner.capacity import Capacities
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile

MOST_SAMPLES = 1000
"""Battery samples kept of a device: at one a second more than the quarter of an hour that is looked at."""

HOLES = 0.05
"""Part of a device's memory that no later plan counts with once its process has held a stage: what such a process gives
back leaves holes in its heap. A stage that was predicted to take 757 MiB ran out of 800 so."""


class Crew:
    """See the module. Who is in changes; what is known of who is gone is forgotten."""

    def __init__(self, cluster: ClusterProfile) -> None:
        self._devices = {device.worker: device for device in cluster.devices}
        self._links = {(link.source, link.target): link for link in cluster.links}
        self._batteries: dict[WorkerId, list[BatterySample]] = {}
        self._used: set[WorkerId] = set()
        self.capacities = Capacities()
        self._planned_with = self.capacities

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Those that have been measured."""
        return frozenset(self._devices)

    def device(self, worker: WorkerId) -> DeviceProfile:
        """As it was profiled, with the limit that holds now."""
        return self._devices[worker]

    def add(self, found: ClusterProfile) -> None:
        """A device has been measured."""
        for device in found.devices:
            self.forget(device.worker)
            self._devices[device.worker] = device
        self._links |= {(link.source, link.target): link for link in found.links}

    def forget(self, worker: WorkerId) -> None:
        """A device is gone."""
        self._devices.pop(worker, None)
        self._batteries.pop(worker, None)
        self._used.discard(worker)
        self._links = {ends: link for ends, link in self._links.items() if worker not in ends}
        self.capacities = capacity.forgotten(self.capacities, worker)

    def limit(self, worker: WorkerId, memory_bytes: int) -> None:
        """From now on a plan may use so much of a device."""
        self._devices[worker] = msgspec.structs.replace(self._devices[worker], memory_bytes=memory_bytes)

    def cluster(self, workers: Collection[WorkerId]) -> ClusterProfile:
        """Some of them, at the speeds measured since they were profiled: what the next plan is made of."""
        self._planned_with = self.capacities
        devices = tuple(self._with_holes(device) for worker, device in self._devices.items() if worker in workers)
        links = tuple(link for ends, link in self._links.items() if {*ends} <= {*workers})
        return capacity.rescaled(ClusterProfile(devices=devices, links=links), self.capacities)

    def have_held(self, workers: Collection[WorkerId]) -> None:
        """These processes have held a stage."""
        self._used |= {*workers}

    def _with_holes(self, device: DeviceProfile) -> DeviceProfile:
        if device.worker not in self._used:
            return device
        return msgspec.structs.replace(device, memory_bytes=round(device.memory_bytes * (1 - HOLES)))

    def planned(self) -> None:
        """The plan that was made of the last `cluster` takes effect."""
        self.capacities = capacity.adopted(self.capacities, self._planned_with)

    @property
    def rates(self) -> dict[tuple[WorkerId, WorkerId], float]:
        """Bytes per second of each direct link, by its source and target."""
        return {ends: link.bytes_per_s for ends, link in self._links.items()}

    def slowest_link(self, workers: Collection[WorkerId]) -> LinkProfile | None:
        """Of those between some of them."""
        links = [link for ends, link in self._links.items() if {*ends} <= {*workers}]
        return min(links, key=lambda link: link.bytes_per_s, default=None)

    def note_battery(self, worker: WorkerId, sample: BatterySample) -> list[BatterySample]:
        """Its battery's charge so far, oldest first."""
        history = self._batteries.setdefault(worker, [])
        history.append(sample)
        del history[:-MOST_SAMPLES]
        return history
