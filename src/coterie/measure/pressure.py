"""Memory that a worker may use now: the least of its budget, its containers, its process's limit and what others leave.

Asked for again and again while it works. `pressure` in Linux's words (PSI) says how much of the time programs waited
for memory; it is shown, and decides nothing.
"""

import sys
from pathlib import Path
from typing import Protocol

import msgspec

from coterie.errors import UsageError
from coterie.measure.budget import MemoryBudget, memory_budget
from coterie.measure.process_memory import current_rss_bytes, data_limit_bytes, is_own_limit, private_limit_bytes
from coterie.profiles.cluster_profile import DeviceType
from coterie.units import format_bytes, parse_memory

PSI = Path("/proc/pressure/memory")


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """What this process may use in all now, and what it uses.

    Attributes:
        why: Which of the limits that is, for people.
        stalled: Part of the last ten seconds in which some program waited for memory, 0 to 1; None if nobody says.
    """

    limit_bytes: int
    used_bytes: int
    why: str
    stalled: float | None = None

    @property
    def available_bytes(self) -> int:
        """What the worker could still take."""
        return max(self.limit_bytes - self.used_bytes, 0)


class MemorySource(Protocol):
    """Something that knows what may be used. `read` takes about a millisecond."""

    def read(self) -> MemoryReading:
        """As of now."""
        ...


class SystemMemory:
    """What the operating system says, and the device's owner.

    Args:
        user_limit: Bytes that the owner allows; None for no limit of their own.
        device_type: Whose memory.
        file: A file with a size, such as `400MiB`, that holds beside all other limits while it exists: lets the owner
            (or a test) change the budget of a worker that runs.
    """

    def __init__(self, user_limit: int | None, device_type: DeviceType = "cpu", file: Path | None = None) -> None:
        self._user_limit = user_limit
        self._device_type = device_type
        self._file = file
        self._first_process_limit: int | None = None
        self._has_read = False

    def read(self) -> MemoryReading:
        """See `MemorySource`."""
        used = current_rss_bytes()
        options = [memory_budget(self._user_limit, device_type=self._device_type), *self._further()]
        least = min(options, key=lambda option: option.bytes)
        return MemoryReading(limit_bytes=least.bytes, used_bytes=used, why=least.why, stalled=stalled_share(PSI))

    def _further(self) -> list[MemoryBudget]:
        options = []
        if (limit := self._changed_process_limit()) is not None:
            options.append(MemoryBudget(bytes=limit, why=f"{format_bytes(limit)} by the limit on this process"))
        if self._file is not None and (limit := size_in(self._file)) is not None:
            options.append(MemoryBudget(bytes=limit, why=f"{format_bytes(limit)} by {self._file}"))
        return options

    def _changed_process_limit(self) -> int | None:
        """The limit on this process if somebody has changed it: the one it began with is part of the budget already.

        That one also counts what is mapped and never touched, by which the budget would seem to shrink as threads come.
        """
        set_to = private_limit_bytes()
        if not self._has_read:
            self._has_read, self._first_process_limit = True, set_to
        # The worker's own limit may be set after the first look: it is no change from outside.
        is_known = set_to == self._first_process_limit or is_own_limit(set_to)
        return None if is_known else data_limit_bytes()


def size_in(file: Path) -> int | None:
    """The size that a file holds; None if it is absent, empty or being written."""
    try:
        return parse_memory(file.read_text())
    except (OSError, ValueError):
        return None


def check_memory_file(file: Path) -> None:
    """Is what stands in the owner's file a size? An absent file is one that sets no limit yet.

    Raises:
        UsageError: It holds something else.
    """
    try:
        text = file.read_text()
    except OSError:
        return
    try:
        parse_memory(text)
    except ValueError as error:
        raise UsageError(f"{file}: {error}", hint="write a size such as 400MiB into it") from error


def stalled_share(file: Path) -> float | None:
    """What pressure-stall information says of the last ten seconds; None where the kernel keeps none."""
    if sys.platform != "linux":
        return None
    try:
        words = file.read_text().split()
    except OSError:
        return None
    told = next((word for word in words if word.startswith("avg10=")), None)
    try:
        return None if told is None else float(told.removeprefix("avg10=")) / 100
    except ValueError:
        return None
