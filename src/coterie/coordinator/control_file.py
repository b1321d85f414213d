"""`control.json` in a run's folder: how to ask the run's coordinator, for this user and nobody else."""

import contextlib
import os
import platform
from pathlib import Path

import msgspec
import psutil

from coterie.errors import StorageError
from coterie.transport.pinned_https import Endpoint
from coterie.transport.private_files import write_private

CONTROL_FILE = "control.json"


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says.

    Attributes:
        hosts: Where this machine reaches the coordinator.
        others: Where other machines do; empty if none can.
        token: Lets its holder see and stop the run; a secret.
        machine, pid, began_s: The coordinator's process; a process id alone may be another's by now.
    """

    run: str
    hosts: tuple[str, ...]
    others: tuple[str, ...] = ()
    port: int
    fingerprint: str
    token: str
    machine: str
    pid: int
    began_s: float

    def __repr__(self) -> str:
        return f"Control(run={self.run!r}, hosts={self.hosts!r}, port={self.port}, pid={self.pid}, token=…)"

    @property
    def endpoint(self) -> Endpoint:
        """The coordinator as this machine reaches it."""
        return Endpoint(hosts=self.hosts, port=self.port, fingerprint=self.fingerprint, token=self.token)

    @property
    def is_gone(self) -> bool:
        """Whether the process that wrote the file has ended and left it behind, as far as can be told here."""
        if self.machine != platform.node():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.began_s) > _CLOCK_STEPS_S
        except psutil.Error:
            return True


_CLOCK_STEPS_S = 2.0
"""Linux counts a process's start from the boot, whose date moves a little when the clock is set."""


def this_process() -> tuple[str, int, float]:
    """What a control file says of the process that writes it: machine, process id, when it began."""
    return platform.node(), os.getpid(), psutil.Process().create_time()


def write_control(folder: Path, control: Control) -> None:
    """Put the file into the run's folder, readable by this user only.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        write_private(folder / CONTROL_FILE, msgspec.json.encode(control))
    except OSError as error:
        raise StorageError(
            f"cannot write {folder / CONTROL_FILE}: {error.strerror or error}",
            hint="choose a writable folder with free space by --output",
        ) from error


def read_control(folder: Path) -> Control | None:
    """What the folder's file says; None if there is none, or none that this version can read."""
    try:
        return msgspec.json.decode((folder / CONTROL_FILE).read_bytes(), type=Control)
    except (OSError, msgspec.DecodeError):
        return None


def remove_control(folder: Path, token: str) -> None:
    """Take the file away, unless another coordinator has put its own there meanwhile."""
    written = read_control(folder)
    if written is not None and written.token == token:
        with contextlib.suppress(OSError):
            (folder / CONTROL_FILE).unlink()
