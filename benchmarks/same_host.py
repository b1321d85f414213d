"""What a frame between two workers of one machine costs: over their Unix socket alone, and with memory they share."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from coterie.transport.connect import connect_unix
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.server import FrameServer, PeerInfo, ServedLink
from coterie.transport.shared_memory import LEAST_BYTES, knows_memory_files
from coterie.units import MIB, format_bytes
from reporting import Report, parse_arguments

SIZES_BYTES = {"256_kib": MIB // 4, "1_mib": MIB, "4_mib": 4 * MIB, "8_mib": 8 * MIB}
CARRIERS = {"unix": "Unix socket", "shared": "Unix socket and shared memory"}
WARM_UP = 8
TARGET_RATIO = 1.3
"""Less would not be worth the code."""


def tensor_frame(data: np.ndarray) -> Frame:
    """A frame with one tensor."""
    spec = TensorSpec(name="x", dtype="uint8", shape=data.shape, nbytes=data.nbytes)
    return Frame(FrameHeader(kind="hidden", tensors=(spec,)), (data.data,))


async def receive(carrier: str, frames: int) -> None:
    """Let one peer in, take its frames, acknowledge each, and print the CPU seconds per frame."""
    over = asyncio.Event()

    async def serve(link: ServedLink, _: PeerInfo) -> None:
        link.accept()
        if carrier == "shared":
            link.share_memory()
        begin_s = 0.0
        for number in range(WARM_UP + frames):
            if number == WARM_UP:
                begin_s = time.process_time()
            await link.receive()
            await link.send(Frame(FrameHeader(kind="done")))
        print(json.dumps((time.process_time() - begin_s) / frames), flush=True)
        over.set()

    server = FrameServer(serve)
    await server.start("127.0.0.1")
    print(server.unix_path, flush=True)
    await over.wait()
    await server.close()


async def send(path: Path, carrier: str, size: int, frames: int) -> float:
    """Send frames one after the other; the CPU seconds per frame."""
    link = await connect_unix(path)
    while carrier == "shared" and not link.shares_memory:
        await asyncio.sleep(0)
    data = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    begin_s = 0.0
    for number in range(WARM_UP + frames):
        if number == WARM_UP:
            begin_s = time.process_time()
        await link.send(tensor_frame(data))
        await link.receive()
    cpu_s = (time.process_time() - begin_s) / frames
    await link.close()
    return cpu_s


def transfer(carrier: str, size: int, frames: int) -> float:
    """CPU seconds of both ends for a frame."""
    command = [sys.executable, __file__, "receive", carrier, str(frames)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        path = Path(receiver.stdout.readline().strip())
        sent_s = asyncio.run(send(path, carrier, size, frames))
        return sent_s + float(json.loads(receiver.stdout.readline()))


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    if not knows_memory_files():
        print("This Python has no anonymous memory files, which only Linux knows, to compare with.")
        return 0
    rounds, frames = (2, 30) if arguments.quick else (7, 100)
    report = Report(
        "same_host",
        "frames of one tensor over the links that workers use, each acknowledged by a frame; CPU of both processes "
        f"per frame, medians of interleaved rounds. Frames below {format_bytes(LEAST_BYTES)} stay with the socket.",
        arguments,
    )
    found: dict[tuple[str, str], list[float]] = {(carrier, size): [] for size in SIZES_BYTES for carrier in CARRIERS}
    for _ in range(rounds):
        for (carrier, size), values in found.items():
            values.append(transfer(carrier, SIZES_BYTES[size], frames))
    cpu_ms = {key: statistics.median(values) * 1e3 for key, values in found.items()}
    report.table(
        "CPU ms per frame, both ends",
        ["carrier", *(format_bytes(size) for size in SIZES_BYTES.values())],
        [[name, *(f"{cpu_ms[carrier, size]:.2f}" for size in SIZES_BYTES)] for carrier, name in CARRIERS.items()],
    )
    for size, size_bytes in SIZES_BYTES.items():
        ratio = cpu_ms["unix", size] / cpu_ms["shared", size]
        report.figure(f"unix_over_shared_memory_{size}", ratio, at_least=TARGET_RATIO if size_bytes >= MIB else None)
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        asyncio.run(receive(sys.argv[2], int(sys.argv[3])))
        sys.exit(0)
    sys.exit(main())
