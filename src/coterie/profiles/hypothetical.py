"""Devices that are not there: this machine's measured profile, scaled, to plan for machines before they are bought."""

from collections.abc import Sequence
from itertools import permutations

import msgspec

from coterie.ids import WorkerId
from coterie.profiles.cluster_profile import ClusterProfile, DeviceProfile, LinkProfile, at_speed, plannable_bytes
from coterie.profiles.power import PowerModel


class HypotheticalDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as its owner describes it.

    Attributes:
        name: What to call it.
        memory_bytes: What a worker may use there; None: as much as on the measured machine.
        speed: How fast it computes, the measured machine being 1.
        power: What it draws; no plan depends on it.
    """

    name: str
    memory_bytes: int | None = None
    speed: float = 1.0
    power: PowerModel = PowerModel()


class EvenLinks(msgspec.Struct, frozen=True, kw_only=True):
    """A network in which every pair of devices has the same link."""

    bytes_per_s: float
    latency_s: float


def hypothetical_cluster(
    devices: Sequence[HypotheticalDevice], measured: DeviceProfile, links: EvenLinks | None
) -> ClusterProfile:
    """The devices as profiles, in their order; without `links` none counts as measured."""
    profiles = tuple(_scaled(device, measured) for device in devices)
    pairs = permutations([profile.worker for profile in profiles], 2) if links is not None else ()
    return ClusterProfile(
        devices=profiles,
        links=tuple(
            LinkProfile(source=source, target=target, bytes_per_s=links.bytes_per_s, latency_s=links.latency_s)
            for source, target in pairs
            if links is not None
        ),
    )


def _scaled(device: HypotheticalDevice, measured: DeviceProfile) -> DeviceProfile:
    return msgspec.structs.replace(
        at_speed(measured, device.speed),
        worker=WorkerId(device.name),
        name=device.name,
        memory_bytes=measured.memory_bytes if device.memory_bytes is None else plannable_bytes(device.memory_bytes),
    )
