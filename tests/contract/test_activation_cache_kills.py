"""A server that is killed while it caches: every batch it had acknowledged is there, none is there in part or twice."""

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from coterie.sidetuning.activation_cache import ActivationCache
from coterie.sidetuning.activations import ActivationBatch
from coterie.sidetuning.cache_layout import CacheLayout
from coterie.units import MIB

LAYOUT = CacheLayout(layers=(1, 2, 3, 4), width=96, dtype="float32", key={"model": "m"})
BATCHES, ROWS, KILLS = 6, 4, 20
LONGEST = {"opening": 40, "writing": 30, "anywhere": 4000}
"""Events after which a writer is killed at the latest: file calls while it opens or writes, or calls of any function.

Opening takes about 30 and 2,000, a batch 8 and 500 to 900."""


def batch_of(number: int) -> ActivationBatch:
    generator = torch.Generator().manual_seed(number)
    counts = torch.randint(0, 4, (ROWS,), generator=generator)
    taps = torch.randn(int(counts.sum()), len(LAYOUT.layers), LAYOUT.width, generator=generator)
    return ActivationBatch(
        samples=torch.arange(number * ROWS, (number + 1) * ROWS),
        counts=counts,
        layers=LAYOUT.layers,
        taps=taps,
        labels=torch.randint(0, 9, (len(taps),), generator=generator),
    )


def open_cache(folder: Path) -> ActivationCache:
    return ActivationCache.open(folder, LAYOUT, MIB)


WRITER = textwrap.dedent(
    """
    import importlib.util, os, signal, sys
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("contract", sys.argv[1])
    contract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contract)

    FILE_CALLS = {"open", "write", "truncate", "fsync", "mkdir", "replace", "mmap"}

    def kill_after(events, when):
        # kill -9 immediately before or after a call: of a function of the file system, or any, in Python or C
        def count(frame, event, argument):
            nonlocal events
            events -= when == "anywhere" or getattr(argument, "__name__", "") in FILE_CALLS
            if events == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)

    def write(folder, when, events):
        if when in ("opening", "anywhere"):
            kill_after(events, when)
        cache = contract.open_cache(folder)
        if when == "writing":
            kill_after(events, when)
        for number in range(contract.BATCHES):
            if number * contract.ROWS not in cache:
                cache.put(contract.batch_of(number), (number, 0))
                os.write(1, f"{number} ".encode())
        cache.close()

    for line in sys.stdin:
        folder, when, events = line.split()
        child = os.fork()
        if child == 0:
            write(Path(folder), when, int(events))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os.write(1, f"{'killed' if os.WIFSIGNALED(status) else status}\\n".encode())
    """
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked writers; this system cannot fork")
def test_a_cache_survives_kills_at_any_point_and_goes_on(tmp_path):
    draw = random.Random(5)
    kills = finished = 0
    command = [sys.executable, "-c", WRITER, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        while kills < KILLS:
            folder = tmp_path / str(finished)
            when = draw.choice(["opening", "writing", "writing", "anywhere"])
            writer.stdin.write(f"{folder} {when} {draw.randrange(1, LONGEST[when])}\n")
            *acknowledged, end = writer.stdout.readline().split()
            assert end in {"killed", "0"}
            kills += end == "killed"
            finished += check(folder, acknowledged) == BATCHES
        writer.stdin.write(f"{tmp_path / 'last'} never 0\n")
        assert writer.stdout.readline().split() == [*map(str, range(BATCHES)), "0"]
        assert check(tmp_path / "last", []) == BATCHES
        writer.stdin.close()
    assert finished, "a cache was finished in spite of kills"


def check(folder: Path, acknowledged: list[str]) -> int:
    """What is there is whole, in order, and at least what was acknowledged; returns how many batches are there."""
    with open_cache(folder) as cache:
        cache.verify()
        count = len(cache) // ROWS
        assert cache.samples == tuple(range(count * ROWS))
        assert all(int(number) < count for number in acknowledged)
        for number in range(count):
            wanted, found = batch_of(number), cache.read(batch_of(number).samples)
            assert torch.equal(found.counts, wanted.counts)
            assert torch.equal(found.taps, wanted.taps)
            assert found.labels is not None
            assert wanted.labels is not None
            assert torch.equal(found.labels, wanted.labels)
        size = (folder / "rows.bin").stat().st_size
        assert size == LAYOUT.bytes_for(sum(batch_of(number).tokens for number in range(count)))
        return count
