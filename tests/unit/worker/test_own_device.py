"""What a worker computes with: memory that a stage gave back is there for the next one, limit or not."""

import subprocess
import sys

import pytest

_HOLE = """
import mmap
from coterie.measure.process_memory import current_rss_bytes, limit_memory
from coterie.transport.user_settings import IN_MEMORY
from coterie.worker.own_device import OwnDevice
from coterie.worker.settings import WorkerSettings

MIB = 1 << 20
limit = current_rss_bytes() + 64 * MIB
device = OwnDevice(WorkerSettings(name="board", identity=IN_MEMORY, memory_bytes=limit, enforce_memory=True), print)
assert limit_memory(limit)
hole = mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for offset in range(0, len(hole), mmap.PAGESIZE):
    hole[offset] = 1
hole.madvise(mmap.MADV_DONTNEED)  # what an allocator does with a hole in its heap
device.free_memory()
try:
    print(len(bytearray(48 * MIB)) // MIB)
except MemoryError:
    print("full")
device.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces limits")
def test_what_a_stage_gave_back_is_there_for_the_next_one_under_a_limit_of_the_workers_own():
    done = subprocess.run([sys.executable, "-c", _HOLE], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["48"], done.stderr
