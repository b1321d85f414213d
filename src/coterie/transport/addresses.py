"""Which addresses other devices may reach this one at, the likeliest first."""

import ipaddress
import re
import socket

import psutil

_VIRTUAL = re.compile(r"^(docker|br-|veth|virbr|vmnet|vboxnet|vEthernet|cni|flannel|podman|lxc)", re.IGNORECASE)
_TUNNEL = re.compile(r"^(tun|tap|utun|wg|tailscale|zt|ppp|ipsec|nordlynx)", re.IGNORECASE)

_TUNNELS, _BRIDGES = 2, 4
"""From these ranks on; the odd rank after each is for IPv6."""

MOST_OF_A_KIND = 3


def own_addresses(*, loopback: bool = True) -> tuple[str, ...]:
    """Addresses of this machine to write into a join link, best first.

    The address that the default route uses comes first unless it is a tunnel's (a VPN that takes all traffic: other
    devices here do not reach it), then other networks, IPv4 before IPv6, then tunnels, then bridges of containers and
    virtual machines, then (if `loopback`) 127.0.0.1, for a worker on this machine. Link-local addresses need a zone
    that only this machine knows, and are left out; of each kind a few are enough (IPv6 gives an interface many).
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
    addresses = order_addresses(ranked, default_route_address())
    if loopback:
        addresses.append("127.0.0.1")
    return tuple(dict.fromkeys(addresses))


def order_addresses(ranked: list[tuple[int, str]], default: str | None) -> list[str]:
    """Addresses with their ranks, best first; that of the default route leads those of its rank and worse networks."""
    kept: list[tuple[int, str]] = []
    for rank, address in sorted(ranked, key=lambda pair: (pair[0], pair[1] != default)):
        if sum(rank == other for other, _ in kept) < MOST_OF_A_KIND:
            kept.append((rank, address))
    networks = [address for rank, address in kept if rank < _TUNNELS]
    if default in networks:
        networks.remove(default)
        networks.insert(0, default)
    return networks + [address for rank, address in kept if rank >= _TUNNELS]


def rank_address(interface: str, address: str) -> int | None:
    """How late an interface's address is to be tried; None: not at all."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified:
        return None
    kind = _BRIDGES if _VIRTUAL.match(interface) else (_TUNNELS if _TUNNEL.match(interface) else 0)
    return kind + (1 if parsed.version == 6 else 0)


def is_loopback(host: str) -> bool:
    """Whether an address (or the one name that everybody gives it) is a machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def default_route_address() -> str | None:
    """The address that packets to the outside carry; None without a default route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address; connecting UDP only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])
