"""Where a worker stands: which machine this is, and whether a run leaves it."""

import platform
import uuid
from pathlib import Path

from coterie.transport.addresses import is_loopback
from coterie.transport.join_link import JoinLink


def is_local(join: JoinLink) -> bool:
    """Whether the run is on this machine only."""
    return all(is_loopback(host) for host in join.hosts)


def host_id() -> str:
    """Equal for workers that can share a Unix socket: the boot of this machine, or its network card."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{platform.node()}-{boot.read_text().strip()}"
    except OSError:
        return f"{platform.node()}-{uuid.getnode():x}"
