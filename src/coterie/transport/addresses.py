"""Which addresses other devices may reach this one at, the likeliest first."""

import ipaddress
import re
import socket

import psutil

_VIRTUAL = re.compile(r"^(docker|br-|veth|virbr|vmnet|vboxnet|vEthernet|cni|flannel|podman|lxc)", re.IGNORECASE)
_TUNNEL = re.compile(r"^(tun|tap|utun|wg|tailscale|zt|ppp|ipsec|nordlynx)", re.IGNORECASE)


def own_addresses(*, loopback: bool = True) -> tuple[str, ...]:
    """Addresses of this machine to write into a join link, best first.

    The address that the default route uses comes first, then other networks, IPv4 before IPv6, then tunnels, then
    bridges of containers and virtual machines, then (if `loopback`) 127.0.0.1, for a worker on this machine.
    Link-local addresses need a zone that only this machine knows, and are left out.
    """
    running = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    ranked: list[tuple[int, str]] = []
    for name, entries in psutil.net_if_addrs().items():
        if name in running:
            ranked += [
                (rank, entry.address)
                for entry in entries
                if entry.family in (socket.AF_INET, socket.AF_INET6)
                and (rank := rank_address(name, entry.address)) is not None
            ]
    addresses = [address for _, address in sorted(ranked, key=lambda pair: pair[0])]
    first = default_route_address()
    if first is not None and first in addresses:
        addresses.remove(first)
        addresses.insert(0, first)
    if loopback:
        addresses.append("127.0.0.1")
    return tuple(dict.fromkeys(addresses))


def rank_address(interface: str, address: str) -> int | None:
    """How late an interface's address is to be tried; None: not at all."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified:
        return None
    kind = 4 if _VIRTUAL.match(interface) else (2 if _TUNNEL.match(interface) else 0)
    return kind + (1 if parsed.version == 6 else 0)


def default_route_address() -> str | None:
    """The address that packets to the outside carry; None without a default route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address; connecting UDP only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])
