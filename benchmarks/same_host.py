"""What a frame between two workers of one machine costs: over a Unix socket, as they do it, and over shared memory."""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from coterie.transport.connect import connect_unix
from coterie.transport.frame import Frame, FrameHeader, TensorSpec
from coterie.transport.stream_link import StreamLink
from coterie.units import MIB
from reporting import Report, parse_arguments

SIZES_BYTES = (MIB, 4 * MIB, 8 * MIB)
CARRIERS = {
    "unix": "Unix socket",
    "copied": "shared memory, copied out",
    "in-place": "shared memory, read in place",
}
WARM_UP = 5


def tensor_frame(data: np.ndarray) -> Frame:
    """A frame with one tensor."""
    spec = TensorSpec(name="x", dtype="uint8", shape=data.shape, nbytes=data.nbytes)
    return Frame(FrameHeader(kind="hidden", tensors=(spec,)), (data.data,))


def mapped(folder: Path) -> np.ndarray:
    """The memory that both ends share."""
    return np.memmap(folder / "memory", np.uint8, "r+")


async def receive(folder: Path, carrier: str, frames: int) -> None:
    """Take frames, acknowledge each, and print the CPU seconds per frame."""
    links: asyncio.Queue[StreamLink] = asyncio.Queue()

    def made() -> StreamLink:
        link = StreamLink()
        links.put_nowait(link)
        return link

    server = await asyncio.get_running_loop().create_unix_server(made, str(folder / "link"))
    print("ready", flush=True)
    link = await links.get()
    shared = mapped(folder)
    kept: object = None
    begin_s = 0.0
    for number in range(WARM_UP + frames):
        if number == WARM_UP:
            begin_s = time.process_time()
        frame = await link.receive()
        kept = np.array(shared) if carrier == "copied" else frame
        await link.send(Frame(FrameHeader(kind="done")))
    print(json.dumps((time.process_time() - begin_s) / frames), flush=True)
    del kept
    await link.close()
    server.close()


async def send(folder: Path, carrier: str, frames: int) -> float:
    """Send frames one after the other; the CPU seconds per frame."""
    link = await connect_unix(folder / "link")
    shared = mapped(folder)
    data = np.random.default_rng(0).integers(0, 255, shared.size, dtype=np.uint8)
    begin_s = 0.0
    for number in range(WARM_UP + frames):
        if number == WARM_UP:
            begin_s = time.process_time()
        if carrier == "unix":
            await link.send(tensor_frame(data))
        else:
            shared[:] = data
            await link.send(Frame(FrameHeader(kind="hidden")))
        await link.receive()
    cpu_s = (time.process_time() - begin_s) / frames
    await link.close()
    return cpu_s


def transfer(carrier: str, size: int, frames: int) -> float:
    """CPU seconds of both ends for a frame."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:  # noqa: S108 - memory, not a disk
        folder = Path(name)
        (folder / "memory").write_bytes(bytes(size))
        command = [sys.executable, __file__, "receive", name, carrier, str(frames)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            sent_s = asyncio.run(send(folder, carrier, frames))
            return sent_s + float(json.loads(receiver.stdout.readline()))


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    rounds, frames = (1, 10) if arguments.quick else (5, 60)
    report = Report(
        "same_host",
        "frames of one tensor, each acknowledged; CPU of both processes per frame, medians of interleaved rounds. With "
        "shared memory the header goes over the socket, and one copy is made into the memory.",
        arguments,
    )
    found: dict[tuple[str, int], list[float]] = {(carrier, size): [] for carrier in CARRIERS for size in SIZES_BYTES}
    for _ in range(rounds):
        for (carrier, size), values in found.items():
            values.append(transfer(carrier, size, frames))
    cpu_ms = {key: statistics.median(values) * 1e3 for key, values in found.items()}
    report.table(
        "CPU ms per frame, both ends",
        ["carrier", *(f"{size // MIB} MiB" for size in SIZES_BYTES)],
        [[name, *(f"{cpu_ms[carrier, size]:.2f}" for size in SIZES_BYTES)] for carrier, name in CARRIERS.items()],
    )
    for size in SIZES_BYTES:
        ratio = cpu_ms["unix", size] / cpu_ms["copied", size]
        report.figure(f"unix_over_shared_memory_{size // MIB}_mib", ratio)
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        asyncio.run(receive(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
        sys.exit(0)
    sys.exit(main())
