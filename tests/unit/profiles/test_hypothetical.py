import pytest

from coterie.profiles.cluster_profile import DeviceProfile, UnitTiming
from coterie.profiles.hypothetical import EvenLinks, HypotheticalDevice, hypothetical_cluster

MEASURED = DeviceProfile(
    worker="w",
    name="this machine",
    memory_bytes=1000,
    base_bytes=100,
    timings=(
        UnitTiming(
            kind="block",
            forward_fixed_s=1.0,
            forward_per_row_s=2.0,
            backward_fixed_s=3.0,
            backward_per_row_s=4.0,
        ),
    ),
    flops_per_s=1e9,
    update_bytes_per_s=1e8,
)


def test_a_device_is_this_machine_scaled_and_keeps_a_reserve_as_a_worker_does() -> None:
    half = HypotheticalDevice(name="half", memory_bytes=500, speed=0.5)
    (device,) = hypothetical_cluster((half,), MEASURED, None).devices
    assert (device.worker, device.name, device.memory_bytes, device.base_bytes) == ("half", "half", 475, 100)
    assert device.timings[0].forward_s(3) == pytest.approx(2 * MEASURED.timings[0].forward_s(3))
    assert device.timings[0].backward_s(3) == pytest.approx(2 * MEASURED.timings[0].backward_s(3))
    assert (device.flops_per_s, device.update_bytes_per_s) == (5e8, 5e7)


def test_without_a_memory_it_has_this_machines() -> None:
    (device,) = hypothetical_cluster((HypotheticalDevice(name="a"),), MEASURED, None).devices
    assert device.memory_bytes == 1000


def test_every_pair_has_the_same_link_in_both_directions() -> None:
    devices = [HypotheticalDevice(name=name) for name in "abc"]
    cluster = hypothetical_cluster(devices, MEASURED, EvenLinks(bytes_per_s=1e6, latency_s=0.01))
    pairs = {(link.source, link.target) for link in cluster.links}
    assert pairs == {(a, b) for a in "abc" for b in "abc" if a != b}
    assert {(link.bytes_per_s, link.latency_s) for link in cluster.links} == {(1e6, 0.01)}


def test_links_that_nobody_described_are_left_unmeasured() -> None:
    devices = [HypotheticalDevice(name=name) for name in "ab"]
    assert hypothetical_cluster(devices, MEASURED, None).links == ()
