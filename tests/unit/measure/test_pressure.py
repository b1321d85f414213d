"""What a running worker may use now."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coterie.errors import UsageError
from coterie.measure.pressure import MemoryReading, SystemMemory, check_memory_file, size_in, stalled_share
from coterie.units import GIB, MIB

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits private memory")


def test_the_owners_file_holds_while_it_exists_and_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    source = SystemMemory(900 * GIB, file=file)
    free = source.read()
    assert free.limit_bytes > MIB
    file.write_text("7MiB\n")
    tight = source.read()
    assert (tight.limit_bytes, str(file) in tight.why) == (7 * MIB, True)
    assert tight.available_bytes == 0  # this process uses more already
    file.unlink()
    assert source.read().limit_bytes > 7 * MIB


def test_what_is_available_is_the_limit_less_what_is_used() -> None:
    assert MemoryReading(limit_bytes=100, used_bytes=30, why="").available_bytes == 70


def test_a_file_with_something_else_is_refused_at_the_start_and_ignored_later(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    check_memory_file(file)
    file.write_text("much")
    with pytest.raises(UsageError, match="much"):
        check_memory_file(file)
    assert size_in(file) is None


@linux_only
def test_a_limit_set_on_the_process_from_outside_is_seen() -> None:
    code = """
import sys, psutil
from coterie.measure.pressure import SystemMemory
source = SystemMemory(None)
assert "this process" not in source.read().why
print("ready", flush=True)
sys.stdin.readline()
reading = source.read()
print(reading.limit_bytes, reading.used_bytes, reading.why, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        target = psutil.Process(process.pid)
        data = target.memory_info().data
        target.rlimit(psutil.RLIMIT_DATA, (data + 50 * MIB, data + 50 * MIB))
        said, _ = process.communicate("\n", timeout=60)
    limit, used, why = said.split(maxsplit=2)
    assert "the limit on this process" in why
    assert int(limit) - int(used) == pytest.approx(50 * MIB, abs=8 * MIB)


@linux_only
def test_the_limit_that_the_worker_sets_itself_is_no_change_even_after_the_first_look() -> None:
    code = """
from coterie.measure.pressure import SystemMemory
from coterie.measure.process_memory import limit_memory
memory = SystemMemory(None)
memory.read()
assert limit_memory(3 << 30)
print(memory.read().why)
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "by the limit on this process" not in said
    assert said.strip()


@linux_only
def test_stalls_are_told_where_the_kernel_counts_them(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    assert stalled_share(file) is None
    file.write_text("some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=3.00 avg60=0 avg300=0 total=1\n")
    assert stalled_share(file) == 0.125
    file.write_text("some avg10=x")
    assert stalled_share(file) is None
