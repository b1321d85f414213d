"""A carrier of real networks: a namespace and a name for each host, veth pairs to a switch, `tbf` for rates. For root.

Hosts have addresses of their own and may dial each other, so direct links are carried and shaped like any other. No
`netem`: kernels without it cannot delay packets, so latency is the relay's to add (`RelayCarrier`).
"""

import os
import subprocess

import msgspec

from coterie.transport.join_link import JoinLink
from testbed.carriers import Cut, Shape

NETWORK = "10.77.0"
"""Nobody else sees it: the addresses exist in these namespaces only."""
BURST = "32kb"
QUEUE_MS = 100
"""What `tbf` holds back before it drops, in time: TCP then slows down, as at a home router."""
MOST_HOSTS = 200


class NamespaceLine:
    """One host's namespace, and its cable to the switch."""

    direct_links = True

    def __init__(self, namespace: str, hub: str, number: int) -> None:
        self.namespace = namespace
        self._hub = hub
        self._port = f"port{number}"
        self.prefix = prefix_of(namespace)
        run(f"ip netns add {namespace}")
        run(f"ip -n {hub} link add {self._port} type veth peer name eth0 netns {namespace}")
        run(f"ip -n {hub} link set {self._port} master lan up")
        run(f"ip -n {namespace} addr add {NETWORK}.{number + 1}/24 dev eth0")
        for device in ("lo", "eth0"):
            run(f"ip -n {namespace} link set {device} up")
        run(f"ip -n {namespace} route add default via {NETWORK}.1")

    def reach(self, join: JoinLink) -> JoinLink:
        """See `Line`."""
        return msgspec.structs.replace(join, hosts=(f"{NETWORK}.1",))

    def shape(self, shape: Shape) -> None:
        """See `Line`.

        Raises:
            ValueError: Latency is asked for.
        """
        if shape.latency_s:
            raise ValueError("a namespace's cable has no latency to set; use the relay carrier")
        for namespace, device in ((self.namespace, "eth0"), (self._hub, self._port)):
            if shape.bytes_per_s:
                limits = f"rate {int(shape.bytes_per_s * 8)}bit burst {BURST} latency {QUEUE_MS}ms"
                run(f"tc -n {namespace} qdisc replace dev {device} root tbf {limits}")
            else:
                subprocess.run(
                    ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False
                )

    def cut(self, how: Cut) -> None:
        """See `Line`.

        Raises:
            ValueError: Connections are to be ended; pulling a cable tells nobody.
        """
        if how != "silent":
            raise ValueError("a pulled cable closes no connection; use the relay carrier")
        run(f"ip -n {self._hub} link set {self._port} down")

    def restore(self) -> None:
        """See `Line`."""
        run(f"ip -n {self._hub} link set {self._port} up")


class NamespaceCarrier:
    """A switch in a namespace of its own, in which the coordinator runs."""

    name = "namespaces"
    host = f"{NETWORK}.1"

    def __init__(self) -> None:
        self._names = f"coterie-{os.getpid()}"
        self._hub = f"{self._names}-hub"
        self._lines: list[NamespaceLine] = []
        self.prefix = prefix_of(self._hub)
        run(f"ip netns add {self._hub}")
        run(f"ip -n {self._hub} link add lan type bridge")
        run(f"ip -n {self._hub} addr add {self.host}/24 dev lan")
        for device in ("lo", "lan"):
            run(f"ip -n {self._hub} link set {device} up")

    def line(self, host: str) -> NamespaceLine:
        """See `Carrier`."""
        number = len(self._lines) + 1
        assert number <= MOST_HOSTS
        plain = "".join(char for char in host if char.isalnum())[:20]
        self._lines.append(NamespaceLine(f"{self._names}-{number}-{plain}", self._hub, number))
        return self._lines[-1]

    def close(self) -> None:
        """See `Carrier`."""
        for namespace in (*(line.namespace for line in self._lines), self._hub):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def prefix_of(namespace: str) -> tuple[str, ...]:
    """Runs a command there, under a host name of its own: devices of one name would share Unix sockets."""
    rename = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
    return ("ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", rename, namespace)


def run(command: str) -> None:
    """Run a command of iproute2.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
