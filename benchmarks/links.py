"""What the frame stream costs: the receiver's CPU at 100 Mbit/s, and its rate on loopback beside a raw socket's."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.units import MIB
from link_processes import FRAME_BYTES
from reporting import Report, parse_arguments

SLOW_BYTES_PER_S = 100e6 / 8
PROGRAM = Path(__file__).with_name("link_processes.py")
KINDS = ("frames", "socket", "frames-tls", "socket-tls")
NAMES = {
    "frames": "frames, no TLS",
    "socket": "raw blocking socket",
    "frames-tls": "frames, TLS (the default)",
    "socket-tls": "raw blocking TLS socket",
}
RECEIVER_SPACE, SENDER_SPACE = "coterie-rx", "coterie-tx"
RECEIVER_HOST, SENDER_HOST = "10.203.0.2", "10.203.0.1"


@contextmanager
def slow_network() -> Iterator[bool]:
    """Two network namespaces joined by a 100 Mbit/s wire; yields whether they could be made (Linux, root, iproute2)."""
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        yield False
        return
    wire = (f"{RECEIVER_SPACE}-w", f"{SENDER_SPACE}-w")
    try:
        made = True
        for space in (RECEIVER_SPACE, SENDER_SPACE):
            made &= _call("ip", "netns", "add", space)
        made &= _call("ip", "link", "add", wire[0], "type", "veth", "peer", "name", wire[1])
        for space, device, host in zip((RECEIVER_SPACE, SENDER_SPACE), wire, (RECEIVER_HOST, SENDER_HOST), strict=True):
            inside = ("ip", "netns", "exec", space)
            made &= _call("ip", "link", "set", device, "netns", space)
            made &= _call(*inside, "ip", "addr", "add", f"{host}/24", "dev", device)
            made &= _call(*inside, "ip", "link", "set", device, "up")
            # Else 64 KiB would arrive at a time, as on no real network.
            made &= _call(*inside, "ip", "link", "set", device, "gso_max_segs", "1")
            shape = ("tbf", "rate", "100mbit", "burst", "32kb", "latency", "50ms")
            made &= _call(*inside, "tc", "qdisc", "add", "dev", device, "root", *shape)
        yield made
    finally:
        for space in (RECEIVER_SPACE, SENDER_SPACE):
            _call("ip", "netns", "del", space)


def _call(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def transfer(kind: str, frames: int, *, slow: bool, spaces: bool) -> tuple[list[float], list[float]]:
    """One receiver and one sender; the receiver's CPU seconds and the wall seconds per frame, the first left out."""
    host = RECEIVER_HOST if spaces else "127.0.0.1"
    rate = SLOW_BYTES_PER_S if slow and not spaces else 0.0
    at_receiver = ["ip", "netns", "exec", RECEIVER_SPACE] if spaces else []
    at_sender = ["ip", "netns", "exec", SENDER_SPACE] if spaces else []
    count = str(frames + 1)
    command = [*at_receiver, sys.executable, str(PROGRAM), "receive", kind, host, count]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        ready = json.loads(receiver.stdout.readline())
        command = [*at_sender, sys.executable, str(PROGRAM), "send", kind, host, count]
        command += [str(ready["port"]), ready["fingerprint"] or "-", str(rate)]
        sender = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        cpu_s = json.loads(receiver.stdout.readline())["cpu_s"]
    return cpu_s[1:], json.loads(sender.stdout.splitlines()[-1])["frame_s"][1:]


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    rounds, slow_frames, fast_frames = (1, 2, 10) if arguments.quick else (5, 4, 40)
    with slow_network() as spaces:
        where = (
            "over veth between two network namespaces shaped by tc tbf, 1500 bytes a packet"
            if spaces
            else "over loopback, the sender paced in steps of 16 KiB (no network namespaces here)"
        )
        report = Report(
            "links",
            f"frames of 8 MiB, one after the other, each acknowledged; receiver and sender in processes of their own; "
            f"CPU of the receiver's process at 100 Mbit/s {where}; rate on loopback unshaped. Medians, "
            f"{rounds} interleaved round(s).",
            arguments,
        )
        slow_cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
        slow_time: dict[str, list[float]] = {kind: [] for kind in KINDS}
        fast_cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
        fast_time: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                cpu_s, frame_s = transfer(kind, slow_frames, slow=True, spaces=spaces)
                slow_cpu[kind] += cpu_s
                slow_time[kind] += frame_s
            for kind in KINDS:
                cpu_s, frame_s = transfer(kind, fast_frames, slow=False, spaces=False)
                fast_cpu[kind] += cpu_s
                fast_time[kind] += frame_s
    report.table(
        "per frame of 8 MiB",
        ("receiver", "CPU ms at 100 Mbit/s", "Mbit/s", "CPU ms on loopback", "MiB/s on loopback"),
        [
            (
                NAMES[kind],
                statistics.median(slow_cpu[kind]) * 1e3,
                FRAME_BYTES * 8 / 1e6 / statistics.median(slow_time[kind]),
                statistics.median(fast_cpu[kind]) * 1e3,
                FRAME_BYTES / MIB / statistics.median(fast_time[kind]),
            )
            for kind in KINDS
        ],
    )
    fast = {kind: statistics.median(times) for kind, times in fast_time.items()}
    milliseconds = {kind: statistics.median(times) * 1e3 for kind, times in slow_cpu.items()}
    report.figure("receiver_cpu_ms_per_8mib", milliseconds["frames"], at_most=25, unit="ms")
    report.figure("receiver_tls_cpu_ms_per_8mib", milliseconds["frames-tls"], at_most=80, unit="ms")
    report.figure("loopback_over_raw_socket", fast["socket"] / fast["frames"], at_least=0.5)
    report.figure("loopback_tls_over_raw_tls_socket", fast["socket-tls"] / fast["frames-tls"])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
