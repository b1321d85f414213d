"""How much memory a worker may use: the least of what its owner allows, its containers allow, and others leave free."""

from pathlib import Path

import msgspec
import psutil

from coterie.measure.process_memory import current_rss_bytes
from coterie.profiles.cluster_profile import DeviceType
from coterie.units import format_bytes

_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes 2**63 rounded down to a page where there is no limit


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker process may use in all, and which of the limits that is."""

    bytes: int
    why: str


class MemoryFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where Linux tells about control groups."""

    membership: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")


class _GroupFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What one version of control groups calls its memory files."""

    version: str
    root: Path
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


def memory_budget(
    user_limit: int | None, *, device_type: DeviceType = "cpu", files: MemoryFiles | None = None
) -> MemoryBudget:
    """What this process may use in all, its present use included; on a GPU, of the device's memory.

    Args:
        user_limit: Bytes that the device's owner allows; None for no limit of their own.
        device_type: Whose memory is asked for.
        files: Where control groups are described.
    """
    options = [_free_memory(), *cgroup_limits(files or MemoryFiles())] if device_type == "cpu" else []
    if device_type != "cpu":
        options.append(_accelerator_memory(device_type))
    if user_limit is not None:
        options.append(MemoryBudget(bytes=user_limit, why=f"{format_bytes(user_limit)} allowed by the device's owner"))
    return min(options, key=lambda option: option.bytes)


def cgroup_limits(files: MemoryFiles) -> tuple[MemoryBudget, ...]:
    """Limits of the control groups (v1 and v2) that this process is in, from its own group up to the root.

    A limit holds for the whole group, so what its other processes use is taken off; cached files, which the kernel
    drops when memory is needed, are not.
    """
    try:
        lines = files.membership.read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return ()
    found: list[MemoryBudget] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for names in _group_files(files.cgroup_root, controllers):
            for folder in _folders_up(names.root, path):
                found.extend(_limit_of(folder, names))
    return tuple(found)


def _free_memory() -> MemoryBudget:
    """What other programs leave, this process's own use added."""
    free = int(psutil.virtual_memory().available) + current_rss_bytes()
    return MemoryBudget(bytes=free, why=f"{format_bytes(free)} of the machine's memory is free or ours")


def _group_files(root: Path, controllers: str) -> tuple[_GroupFiles, ...]:
    """The layouts in which a line of /proc/self/cgroup with these `controllers` may describe memory."""
    if controllers == "":  # v2; `unified` where a system mounts both versions
        return tuple(
            _GroupFiles(
                version="v2",
                root=base,
                limits=("memory.max", "memory.high"),
                usage="memory.current",
                reclaimable="inactive_file",
            )
            for base in (root, root / "unified")
        )
    if "memory" in controllers.split(","):
        return (
            _GroupFiles(
                version="v1",
                root=root / "memory",
                limits=("memory.limit_in_bytes",),
                usage="memory.usage_in_bytes",
                reclaimable="total_inactive_file",
            ),
        )
    return ()


def _folders_up(root: Path, path: str) -> list[Path]:
    """The group's folder and all above it up to `root`.

    Inside a container `path` may be the host's, of which only the root is visible; then the folders just do not exist.
    """
    parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _limit_of(folder: Path, names: _GroupFiles) -> list[MemoryBudget]:
    """The limits set on one group, each as what this process may use of it."""
    limits = {name: limit for name in names.limits if (limit := _read_number(folder / name)) is not None}
    if not limits:
        return []
    own = current_rss_bytes()
    usage = _read_number(folder / names.usage) or 0
    others = max(usage - _read_stat(folder / "memory.stat", names.reclaimable) - own, 0)
    return [
        MemoryBudget(
            bytes=max(limit - others, 0),
            why=f"{format_bytes(limit)} {name} of the container (cgroup {names.version}, {folder})"
            + (f", of which others use {format_bytes(others)}" if others else ""),
        )
        for name, limit in limits.items()
    ]


def _read_number(path: Path) -> int | None:
    """The byte count in a control file; None if it is absent, says `max` or stands for no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdigit() or int(text) >= _NO_LIMIT_BYTES:
        return None
    return int(text)


def _read_stat(path: Path, field: str) -> int:
    """One line of a memory.stat file; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [field]), 0)


def _accelerator_memory(device_type: DeviceType) -> MemoryBudget:
    """What a GPU has free, torch's own use of it added; Apple's GPU shares the machine's memory."""
    import torch  # noqa: PLC0415 - seconds to import, and needed here only

    match device_type:
        case "cuda":
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        case "xpu":
            free = torch.xpu.mem_get_info()[0] + torch.xpu.memory_reserved()
        case "mps":
            free = torch.mps.recommended_max_memory()
        case "cpu":
            return _free_memory()
    return MemoryBudget(
        bytes=int(free), why=f"{format_bytes(free)} of the {device_type} device's memory is free or ours"
    )


def limit_accelerator_memory(device_type: DeviceType, limit_bytes: int) -> bool:
    """Let torch's allocations on a GPU fail beyond `limit_bytes`; whether that was possible.

    What the driver itself takes for the process (some hundred MiB under CUDA) is not part of it.
    """
    import torch  # noqa: PLC0415 - seconds to import, and needed here only

    match device_type:
        case "cuda":
            torch.cuda.set_per_process_memory_fraction(min(limit_bytes / torch.cuda.mem_get_info()[1], 1.0))
        case "xpu":
            torch.xpu.set_per_process_memory_fraction(min(limit_bytes / torch.xpu.mem_get_info()[1], 1.0))
        case "mps":
            torch.mps.set_per_process_memory_fraction(min(limit_bytes / torch.mps.recommended_max_memory(), 1.0))
        case "cpu":
            return False
    return True
