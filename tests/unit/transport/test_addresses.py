import ipaddress

import pytest

from coterie.transport.addresses import own_addresses, rank_address


@pytest.mark.parametrize(
    ("interface", "address"),
    [("lo", "127.0.0.1"), ("eth0", "169.254.3.4"), ("eth0", "fe80::1%eth0"), ("eth0", "0.0.0.0"), ("eth0", "junk")],  # noqa: S104
)
def test_addresses_that_nobody_else_can_reach_are_left_out(interface: str, address: str) -> None:
    assert rank_address(interface, address) is None


def test_networks_come_before_tunnels_and_tunnels_before_bridges_of_containers() -> None:
    order = [
        ("wlan0", "192.168.1.7"),
        ("eth0", "fd00::7"),
        ("tailscale0", "100.64.0.7"),
        ("wg0", "fd01::7"),
        ("docker0", "172.17.0.1"),
        ("br-1a2b3c", "fd02::1"),
    ]
    ranks = [rank_address(*pair) for pair in order]
    assert ranks == sorted(ranks, key=lambda rank: rank if rank is not None else 99)
    assert len(set(ranks)) == len(ranks)


def test_this_machines_addresses_are_addresses_without_repeats_and_loopback_is_last() -> None:
    addresses = own_addresses()
    assert addresses[-1] == "127.0.0.1"
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        ipaddress.ip_address(address)
    assert "127.0.0.1" not in own_addresses(loopback=False)
