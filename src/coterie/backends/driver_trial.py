"""A driver tried out in a process of its own first: one that crashes as it is loaded must not take this one with it.

The process is `python -m coterie.backends.driver_trial MODULE THREADS`; how it ends is all that it says.
"""

import functools
import importlib
import os
import signal
import subprocess
import sys

from coterie.errors import BackendError

TRIAL_S = 60.0


@functools.cache
def crash_of(module: str, threads: int) -> str:
    """How a process ends that probes the backend of `module`, if by a crash; asked once, then known.

    A driver that raises an error says so again when it is probed here.
    """
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter with our own module
            (sys.executable, "-m", __name__, module, str(threads)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its driver did not answer within {TRIAL_S:.0f} s"
    if ended.returncode >= 0:
        return ""
    try:
        name = signal.Signals(-ended.returncode).name
    except ValueError:
        name = str(-ended.returncode)
    return f"its driver crashed in a trial (signal {name})"


def main() -> None:
    """Probe, and be gone before the driver can trip over its own end."""
    try:
        importlib.import_module(sys.argv[1]).probe(int(sys.argv[2]))
    except BackendError:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
