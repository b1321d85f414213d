"""How fast cached activations are read, shuffled: beside plain memory, the disk, other ways to store, and training."""

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch

from activation_cache_rivals import (
    CacheStore,
    MemmapStore,
    SafetensorsStore,
    SqliteStore,
    Store,
    drop_from_memory,
    layout_of,
)
from coterie.jobs.side_spec import SideSpec, UploadDtype
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.side_network import SideNetwork
from coterie.units import MIB, counted, format_bytes
from reporting import Report, parse_arguments

BATCH_ROWS = 8
PIECE_BYTES = 8 * MIB


class Shape(NamedTuple):
    """What the cache sees of a backbone and a task."""

    name: str
    layers: int
    width: int
    tokens: int

    def rows(self, total_bytes: int) -> int:
        """Rows whose float16 activations take about `total_bytes`, whole batches of them."""
        return max(1, total_bytes // (self.layers * self.width * 2 * self.tokens * BATCH_ROWS)) * BATCH_ROWS

    def batch(self, first: int) -> ActivationBatch:
        """A batch of made-up rows, the same ones for a `first`."""
        draw = torch.Generator().manual_seed(first)
        count = BATCH_ROWS * self.tokens
        return ActivationBatch(
            samples=torch.arange(first, first + BATCH_ROWS),
            counts=torch.full((BATCH_ROWS,), self.tokens),
            layers=tuple(range(1, self.layers + 1)),
            taps=torch.randn(count, self.layers, self.width, generator=draw),
            labels=torch.zeros(count, dtype=torch.int64),
        )


OPT = Shape("OPT-1.3B, 1 token a row", 24, 2048, 1)
SHAPES = (OPT, Shape("MiniLM, 1 token a row", 6, 384, 1), Shape("SmolLM2-135M, 40 tokens a row", 30, 576, 40))
OURS = "this cache, on disk"


class Rates(NamedTuple):
    """Float16 bytes per second: written, read shuffled from memory, read shuffled from the disk (0: cannot be told)."""

    written: float
    warm: float
    cold: float


def epochs(rows: int, seed: int) -> Iterator[list[int]]:
    """Batches of an epoch: all rows, shuffled."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    yield from (order[start : start + BATCH_ROWS] for start in range(0, rows, BATCH_ROWS))


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def read_epoch(store: Store, rows: int, seed: int) -> None:
    for samples in epochs(rows, seed):
        store.read(samples)


def measure(store: Store, shape: Shape, rows: int, rounds: int) -> Rates:
    """Write all rows, read epochs from a warm store, then one from a store that was dropped from memory."""
    nbytes = rows * shape.tokens * shape.layers * shape.width * 2
    batches = [shape.batch(first) for first in range(0, min(rows, 64), BATCH_ROWS)]
    write_s = 0.0
    for number, first in enumerate(range(0, rows, BATCH_ROWS)):
        template = batches[number % len(batches)]
        batch = ActivationBatch(
            samples=torch.arange(first, first + BATCH_ROWS), counts=template.counts, layers=template.layers,
            taps=template.taps, labels=template.labels,
        )  # fmt: skip
        write_s += seconds(lambda batch=batch: store.put(batch))
    read_epoch(store, rows, 98)
    warm_s = statistics.median(
        seconds(lambda seed=seed: read_epoch(store, rows, seed)) for seed in range(1, rounds + 1)
    )
    store.reopen()
    cold = nbytes / seconds(lambda: read_epoch(store, rows, 99)) if drop_from_memory(store.files()) else 0.0
    return Rates(nbytes / write_s, nbytes / warm_s, cold)


def memory_rate(nbytes: int, batch_bytes: int) -> float:
    """Bytes per second of copying all bytes, a batch's worth at a time, into new memory; the best of three."""
    source = np.ones(nbytes // batch_bytes * batch_bytes, np.uint8).reshape(-1, batch_bytes)

    def copy() -> None:
        for batch in source:
            batch.copy()

    copy()
    return source.nbytes / min(seconds(copy) for _ in range(3))


def disk_rate(path: Path) -> float:
    """Bytes per second of reading a file from the disk from its start to its end; 0 if it cannot be dropped first."""
    if not drop_from_memory([path]):
        return 0.0
    buffer = bytearray(PIECE_BYTES)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return path.stat().st_size / seconds(read)


def step_s(shape: Shape, repeats: int) -> float:
    """Seconds of the side network's forward and backward alone over a batch: less than any training step."""
    network = SideNetwork(shape.layers, shape.width, SideSpec(), seed=0)
    taps = shape.batch(0).taps

    def step() -> None:
        network(taps).sum().backward()

    step()
    return statistics.median(seconds(step) for _ in range(repeats))


def stores(shape: Shape, folder: Path) -> dict[str, Callable[[], Store]]:
    """Every way to store, by its name in the table."""
    layout = layout_of(shape.layers, shape.width, "float16")
    return {
        OURS: lambda: CacheStore(folder / "cache", layout),
        "this cache, in memory": lambda: CacheStore(folder / "memory", layout, in_memory=True),
        "NumPy memmap, one file": lambda: MemmapStore(folder / "memmap", shape.layers, shape.width),
        "safetensors, a file a batch": lambda: SafetensorsStore(folder / "safetensors"),
        "SQLite, a blob a row": lambda: SqliteStore(folder / "sqlite", shape.layers, shape.width),
    }


def compare_stores(report: Report, folder: Path, total_bytes: int, rounds: int) -> tuple[float, float]:
    """All ways to store, at one shape; this cache's warm rate over memory's, and its cold rate over the disk's."""
    rows = OPT.rows(total_bytes)
    table, found = [], {}
    for name, make in stores(OPT, folder).items():
        store = make()
        rates = found[name] = measure(store, OPT, rows, rounds)
        files = store.files()
        size = sum(path.stat().st_size for path in files)
        store.close()
        if name == OURS:
            disk = disk_rate(folder / "cache" / "rows.bin")
        else:
            shutil.rmtree(store.folder)
        kept = (len(files), format_bytes(size)) if "memory" not in name else ("-", "-")
        cold = rates.cold / MIB if "memory" not in name else "-"
        table.append((name, rates.written / MIB, rates.warm / MIB, cold, *kept))
    batch_bytes = BATCH_ROWS * OPT.layers * OPT.width * 2
    memory = memory_rate(rows // BATCH_ROWS * batch_bytes, batch_bytes)
    table.append(("plain: copy in memory, in order", "-", memory / MIB, "-", "-", "-"))
    table.append(("plain: read from disk, in order", "-", "-", disk / MIB, "-", "-"))
    report.table(
        f"{OPT.name}, float16, {counted(rows, 'row')}, {BATCH_ROWS} a batch; MiB/s",
        ("", "written", "shuffled, warm", "shuffled, cold", "files", "size"),
        table,
    )
    ours = found[OURS]
    return ours.warm / memory, ours.cold / disk if disk else 0.0


def compare_types(report: Report, folder: Path, total_bytes: int, rounds: int) -> float:
    """This cache at every shape and type; the largest share of a training step that reading its batch would add."""
    table, shares = [], []
    for shape in SHAPES:
        train_s = step_s(shape, 5 * rounds)
        rows = shape.rows(total_bytes)
        for dtype in get_args(UploadDtype):
            layout = layout_of(shape.layers, shape.width, dtype)
            place = folder / dtype
            store = CacheStore(place, layout)
            rates = measure(store, shape, rows, rounds)
            store.close()
            shutil.rmtree(place)
            float16_bytes = shape.tokens * shape.layers * shape.width * 2
            read_s = BATCH_ROWS * float16_bytes / rates.warm
            shares.append(read_s / train_s)
            table.append((shape.name, dtype, layout.bytes_for(shape.tokens), 1 / read_s, read_s * 1e3, train_s * 1e3))
    report.table(
        f"this cache on disk, warm; a batch of {BATCH_ROWS} rows, and the side network's forward and backward over it",
        ("", "stored as", "bytes a row", "batches/s", "read, ms", "network, ms"),
        table,
    )
    return max(shares)


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    total_bytes, rounds = (32 * MIB, 1) if arguments.quick else (768 * MIB, 5)
    torch.set_num_threads(1)
    report = Report(
        "activation_cache",
        f"{format_bytes(total_bytes)} of float16 activations, written batch by batch, each batch on the disk before "
        f"the next; then read in shuffled batches: warm ({counted(rounds, 'epoch')}, median) and once after the system "
        "was asked to drop the files from memory, with this cache's checksums checked then. One thread.",
        arguments,
    )
    with tempfile.TemporaryDirectory(prefix="coterie-cache-", dir=Path.cwd()) as name:
        folder = Path(name)
        over_memory, over_disk = compare_stores(report, folder, total_bytes, rounds)
        share = compare_types(report, folder / "types", total_bytes // 4, rounds)
    report.figure("replay_over_memory", over_memory)
    report.figure("replay_over_disk", over_disk)
    report.figure("read_over_network_time", share, at_most=1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
