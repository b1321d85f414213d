import ipaddress

import pytest

from coterie.transport.addresses import order_addresses, own_addresses, rank_address


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


def ranked(*pairs: tuple[str, str]) -> list[tuple[int, str]]:
    return [(rank, address) for interface, address in pairs if (rank := rank_address(interface, address)) is not None]


def test_the_default_routes_address_comes_first() -> None:
    found = ranked(("eth1", "10.0.0.7"), ("wlan0", "192.168.1.7"), ("docker0", "172.17.0.1"))
    assert order_addresses(found, "192.168.1.7") == ["192.168.1.7", "10.0.0.7", "172.17.0.1"]


def test_a_vpn_that_takes_all_traffic_does_not_come_before_the_network_that_the_devices_share() -> None:
    found = ranked(("tun0", "10.8.0.2"), ("wlan0", "192.168.1.7"), ("docker0", "172.17.0.1"))
    assert order_addresses(found, "10.8.0.2") == ["192.168.1.7", "10.8.0.2", "172.17.0.1"]


def test_many_bridges_or_temporary_addresses_do_not_crowd_a_link() -> None:
    bridges = [(f"br-{number:02}", f"172.{number}.0.1") for number in range(18, 30)]
    temporary = [("wlan0", f"2001:db8::{number}") for number in range(1, 9)]
    found = order_addresses(ranked(*bridges, *temporary, ("wlan0", "192.168.1.7")), "192.168.1.7")
    assert found == [
        "192.168.1.7",
        "2001:db8::1",
        "2001:db8::2",
        "2001:db8::3",
        "172.18.0.1",
        "172.19.0.1",
        "172.20.0.1",
    ]


def test_of_many_addresses_of_a_kind_the_default_routes_is_kept() -> None:
    found = order_addresses(ranked(*((f"eth{number}", f"10.0.{number}.1") for number in range(9))), "10.0.8.1")
    assert found == ["10.0.8.1", "10.0.0.1", "10.0.1.1"]
