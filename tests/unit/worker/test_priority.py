"""Other programs go first."""

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="reads POSIX's nice value")
def test_a_worker_that_yields_is_nicer_and_never_less_nice_than_it_was() -> None:
    code = """
import psutil
from coterie.worker.priority import lower_priority
lower_priority(); print(psutil.Process().nice())
psutil.Process().nice(15); lower_priority(); print(psutil.Process().nice())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert [int(line) for line in done.stdout.split()] == [10, 15]
