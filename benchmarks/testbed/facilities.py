"""What this machine gives a test bed: found by trying, never assumed."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

CGROUP = Path("/sys/fs/cgroup")


class Facilities(msgspec.Struct, frozen=True, kw_only=True):
    """What can be had here.

    Attributes:
        namespaces: Network namespaces with veth pairs and `tbf`, which needs root.
        tun: TUN devices, for latency between namespaces.
        cpu_quota: cgroup v1's processor quota.
        memory_limit: cgroup v1's memory limit.
    """

    namespaces: bool
    tun: bool
    cpu_quota: bool
    memory_limit: bool


def probe() -> Facilities:
    """Try each once."""
    namespaces = _namespaces_work()
    return Facilities(
        namespaces=namespaces,
        tun=namespaces and Path("/dev/net/tun").exists() and os.access("/dev/net/tun", os.W_OK),
        cpu_quota=_group_works("cpu", "cpu.cfs_quota_us"),
        memory_limit=_group_works("memory", "memory.limit_in_bytes"),
    )


def describe() -> str:
    """In a line, for reports."""
    found = probe()
    words = {
        "namespaces": found.namespaces,
        "TUN": found.tun,
        "cgroup cpu quota": found.cpu_quota,
        "cgroup memory limit": found.memory_limit,
    }
    return "this machine gives " + (", ".join(name for name, there in words.items() if there) or "nothing of root's")


def _namespaces_work() -> bool:
    """Whether a namespace with a shaped veth pair can be made."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"ct{os.getpid()}p"
    commands = (
        f"ip netns add {name}",
        f"ip -n {name} link add ct-a type veth peer name ct-b",
        f"tc -n {name} qdisc replace dev ct-a root tbf rate 5mbit burst 32kb latency 100ms",
    )
    try:
        return all(
            subprocess.run(command.split(), capture_output=True, check=False).returncode == 0 for command in commands
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _group_works(controller: str, setting: str) -> bool:
    with contextlib.suppress(OSError), group(controller, f"coterie-probe-{os.getpid()}") as folder:
        return (folder / setting).exists()
    return False


@contextlib.contextmanager
def group(controller: str, name: str) -> Iterator[Path]:
    """A cgroup of version 1, removed afterwards.

    Raises:
        OSError: There is no such controller, or it is not ours to use.
    """
    if not (CGROUP / controller / "cgroup.procs").exists():
        raise FileNotFoundError(f"no cgroup of version 1 for {controller}")
    folder = CGROUP / controller / name
    folder.mkdir()
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # its processes have just ended
            folder.rmdir()
