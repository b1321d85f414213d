"""Adds up what each device computes, sends and receives over a run."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from coterie.ids import WorkerId
from coterie.planner.problem import Problem
from coterie.planner.request import PlanRequest
from coterie.planner.way import DeviceCost, WaysRequest
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile
from coterie.profiles.power import PowerModel

INPUT_BYTES = 16
"""Of one token to each stage: its id and its place in the mask, 8 bytes each."""

LABEL_BYTES = 8
"""Of one label, and of one sample's id."""


class Part(msgspec.Struct, kw_only=True):
    """What one device does in a way: filled in as it is found out."""

    does: list[str] = []
    peak_bytes: int = 0
    compute_s: float = 0.0
    network_s: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0


class Ledger:
    """The parts of all devices of one way; links are those of the request's cluster."""

    def __init__(self, request: WaysRequest) -> None:
        self._request = request
        self._problem = Problem(request.adapters, 1)
        self._index = {device.worker: number for number, device in enumerate(self._problem.devices)}
        self._parts: dict[WorkerId, Part] = defaultdict(Part)

    def device(self, worker: WorkerId) -> DeviceProfile:
        """A device by its worker."""
        return self._problem.devices[self._index[worker]]

    def rate(self, source: WorkerId, target: WorkerId) -> float:
        """Bytes per second from one device to another; infinite within one."""
        return float(self._problem.bytes_per_s[self._index[source], self._index[target]])

    def take_part(self, worker: WorkerId, does: str, peak_bytes: int = 0) -> None:
        """A device does something, and needs memory for it."""
        part = self._parts[worker]
        part.does.append(does)
        part.peak_bytes = max(part.peak_bytes, peak_bytes)

    def compute(self, worker: WorkerId, seconds: float) -> None:
        """A device computes."""
        self._parts[worker].compute_s += seconds

    def send(self, source: WorkerId, target: WorkerId, size: float) -> float:
        """Bytes go from one device to another; the seconds that takes. Nothing within one."""
        if source == target or not size:
            return 0.0
        seconds = size / self.rate(source, target)
        sender, receiver = self._parts[source], self._parts[target]
        sender.sent_bytes += size
        receiver.received_bytes += size
        sender.network_s += seconds
        receiver.network_s += seconds
        return seconds

    def costs(self) -> tuple[DeviceCost, ...]:
        """Every device that takes part, in the cluster's order."""
        return tuple(self._cost(device) for device in self._problem.devices if device.worker in self._parts)

    def _cost(self, device: DeviceProfile) -> DeviceCost:
        part = self._parts[device.worker]
        power = self._request.power.get(device.worker, PowerModel())
        return DeviceCost(
            worker=device.worker,
            device_name=device.name,
            does="; ".join(part.does),
            peak_bytes=part.peak_bytes,
            limit_bytes=device.memory_bytes,
            compute_s=part.compute_s,
            network_s=part.network_s,
            sent_bytes=round(part.sent_bytes),
            received_bytes=round(part.received_bytes),
            energy_j=power.energy_j(compute_s=part.compute_s, network_s=part.network_s),
        )


def among(request: PlanRequest, workers: Sequence[WorkerId], *, least: int) -> PlanRequest:
    """The request for these devices alone, using at least some of them; cuts that the user prescribed do not count."""
    cluster = request.cluster
    kept = ClusterProfile(
        devices=tuple(device for device in cluster.devices if device.worker in workers),
        links=tuple(link for link in cluster.links if {link.source, link.target} <= set(workers)),
    )
    most = len(kept.devices) if least > 1 else 1
    return msgspec.structs.replace(request, cluster=kept, min_stages=least, max_stages=most, fixed_stages=None)
