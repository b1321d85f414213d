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

from coterie.units import MIB, counted
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
RECEIVER_SPACE, SENDER_SPACE = f"rx{os.getpid()}", f"tx{os.getpid()}"  # also device names, which are short
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


def transfer(kind: str, frames: int, *, slow: bool, spaces: bool) -> tuple[list[float], float]:
    """One receiver and one sender: the receiver's CPU seconds for each frame, and the wall seconds per frame.

    A first frame, not counted, warms up. On a slow network every frame is acknowledged before the next is sent; else
    they are streamed.
    """
    host = RECEIVER_HOST if spaces else "127.0.0.1"
    rate = SLOW_BYTES_PER_S if slow and not spaces else 0.0
    at_receiver = ["ip", "netns", "exec", RECEIVER_SPACE] if spaces else []
    at_sender = ["ip", "netns", "exec", SENDER_SPACE] if spaces else []
    job = [kind, host, str(frames + 1), "each" if slow else "ends"]
    command = [*at_receiver, sys.executable, str(PROGRAM), "receive", *job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        ready = json.loads(receiver.stdout.readline())
        command = [*at_sender, sys.executable, str(PROGRAM), "send", *job]
        command += [str(ready["port"]), ready["fingerprint"] or "-", str(rate)]
        try:
            sender = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
            cpu_s = json.loads(receiver.stdout.readline())["cpu_s"]
        except BaseException:
            receiver.kill()  # else leaving the block would wait for it
            raise
    return cpu_s, json.loads(sender.stdout)["wall_s"] / frames


class Samples:
    """What one kind of receiver needed, over all rounds."""

    def __init__(self) -> None:
        self.slow_cpu_s: list[float] = []
        self.slow_wall_s: list[float] = []
        self.fast_cpu_s: list[float] = []
        self.fast_wall_s: list[float] = []

    def row(self) -> tuple[float, float, float, float]:
        """CPU ms per frame and Mbit/s on the slow network, CPU ms per frame and MiB/s on loopback."""
        return (
            statistics.median(self.slow_cpu_s) * 1e3,
            FRAME_BYTES * 8 / 1e6 / statistics.median(self.slow_wall_s),
            statistics.median(self.fast_cpu_s) * 1e3,
            FRAME_BYTES / MIB / statistics.median(self.fast_wall_s),
        )


def loopback_ratio(frames: Samples, raw: Samples) -> float:
    """The frame stream's rate over the raw socket's, the median over rounds in which one ran right after the other."""
    pairs = zip(frames.fast_wall_s, raw.fast_wall_s, strict=True)
    return statistics.median(raw_s / frames_s for frames_s, raw_s in pairs)


def measure(rounds: int, slow_frames: int, fast_frames: int, *, spaces: bool) -> dict[str, Samples]:
    """All kinds in turn, round after round."""
    samples = {kind: Samples() for kind in KINDS}
    for _ in range(rounds):
        for kind, of_kind in samples.items():
            cpu_s, wall_s = transfer(kind, slow_frames, slow=True, spaces=spaces)
            of_kind.slow_cpu_s += cpu_s
            of_kind.slow_wall_s.append(wall_s)
        for kind, of_kind in samples.items():
            cpu_s, wall_s = transfer(kind, fast_frames, slow=False, spaces=False)
            of_kind.fast_cpu_s += cpu_s
            of_kind.fast_wall_s.append(wall_s)
    return samples


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    rounds, slow_frames, fast_frames = (1, 2, 20) if arguments.quick else (5, 4, 60)
    with slow_network() as spaces:
        where = (
            "over veth between two network namespaces shaped by tc tbf, 1500 bytes a packet"
            if spaces
            else "over loopback, the sender paced in steps of 16 KiB (no network namespaces here)"
        )
        report = Report(
            "links",
            f"frames of 8 MiB; receiver and sender in processes of their own; CPU of the receiver's process at "
            f"100 Mbit/s {where}, each frame acknowledged; rate on loopback unshaped and streamed. Medians, "
            f"{counted(rounds, 'interleaved round')}.",
            arguments,
        )
        samples = measure(rounds, slow_frames, fast_frames, spaces=spaces)
    report.table(
        "per frame of 8 MiB",
        ("receiver", "CPU ms at 100 Mbit/s", "Mbit/s", "CPU ms on loopback", "MiB/s on loopback"),
        [(NAMES[kind], *of_kind.row()) for kind, of_kind in samples.items()],
    )
    report.figure("receiver_cpu_ms_per_8mib", samples["frames"].row()[0], at_most=25, unit="ms")
    report.figure("receiver_tls_cpu_ms_per_8mib", samples["frames-tls"].row()[0], at_most=80, unit="ms")
    report.figure("loopback_over_raw_socket", loopback_ratio(samples["frames"], samples["socket"]), at_least=0.5)
    report.figure("loopback_tls_over_raw_tls_socket", loopback_ratio(samples["frames-tls"], samples["socket-tls"]))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
