"""`coterie doctor`: what this machine offers, what is missing, and what to do about it."""

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from coterie import __version__
from coterie.cli.formatting import aligned, print_json
from coterie.cli.parser import Parser
from coterie.profiles.cache import cache_folder
from coterie.units import MIB, format_bytes

_REQUIRED = ("torch", "transformers", "peft", "safetensors", "aiohttp", "cryptography", "msgspec", "numpy", "psutil")
_OPTIONAL = {
    "bitsandbytes": "holds frozen weights in 8 or 4 bits",
    "datasets": "reads Hugging Face data sets",
    "tensorboard": "writes TensorBoard files",
    "zeroconf": "finds runs in the local network",
}
_EXTRAS = {"zeroconf": "discovery"}
"""Where an extra is not called as its package is."""
_OLDEST_PYTHON = (3, 11)
_SMALL_BUDGET_BYTES = 512 * MIB
_TOPIC_CELLS = 22
_MARKS = {"ok": "ok  ", "note": "note", "problem": "FAIL"}

# Run in a process of its own: a limit cannot be taken back. It must let a small tensor's worth of memory through and
# refuse a large one with an exception, not with a kill.
_LIMIT_PROBE = """
from coterie.measure.process_memory import current_rss_bytes, limit_memory
if not limit_memory(current_rss_bytes() + (64 << 20)):
    raise SystemExit(3)
small = bytearray(16 << 20)
try:
    large = bytearray(256 << 20)
except MemoryError:
    raise SystemExit(0)
raise SystemExit(4)
"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at: `problem` means that coterie cannot work, `note` that something useful is missing."""

    topic: str
    state: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the doctor found."""

    version: str
    healthy: bool
    findings: tuple[Finding, ...]


def add_parser(verbs: "argparse._SubParsersAction[Parser]") -> Parser:
    """Register the verb."""
    return verbs.add_parser(
        "doctor",
        help="check this machine",
        description="Check this machine: Python, packages, memory and its limits, battery, energy, temperature, the "
        "owner's work, compute devices, backends, folders.\n"
        "Exit code 1 if something is missing without which coterie cannot work.",
    )


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it."""
    findings = (*_software(), *_memory(), *_senses(), *_devices(), *_backends(), *_folders())
    healthy = all(finding.state != "problem" for finding in findings)
    result = Report(version=__version__, healthy=healthy, findings=findings)
    if args.json:
        print_json(result)
    else:
        print(f"coterie {__version__} on {platform.system()} {platform.release()} {platform.machine()}")
        for finding in findings:
            print(aligned([(_MARKS[finding.state], finding.topic.ljust(_TOPIC_CELLS), finding.found)]))
            if finding.advice:
                print(aligned([("    ", " " * _TOPIC_CELLS, f"try: {finding.advice}")]))
        print("This machine can run coterie." if healthy else "Something is missing: see the lines marked FAIL.")
    return 0 if healthy else 1


def _software() -> list[Finding]:
    new_enough = sys.version_info[:2] >= _OLDEST_PYTHON
    findings = [
        Finding(
            topic="Python",
            state="ok" if new_enough else "problem",
            found=platform.python_version(),
            advice="" if new_enough else "install Python 3.11 or newer",
        )
    ]
    versions = {name: _version(name) for name in _REQUIRED}
    absent = [name for name, version in versions.items() if version is None]
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    findings.append(
        Finding(
            topic="packages",
            state="problem" if absent else "ok",
            found=f"missing: {', '.join(absent)}" if absent else present,
            advice=f"pip install {' '.join(absent)}" if absent else "",
        )
    )
    for name, purpose in _OPTIONAL.items():
        version = _version(name)
        findings.append(
            Finding(
                topic=f"{name} (optional)",
                state="ok" if version else "note",
                found=version or f"not installed; it {purpose}",
                advice="" if version else f"pip install 'coterie[{_EXTRAS.get(name, name)}]' if you want that",
            )
        )
    return findings


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> list[Finding]:
    if importlib.util.find_spec("psutil") is None:
        return []
    import psutil  # noqa: PLC0415 - a report without it is still a report

    from coterie.measure.allocator import use_tight_allocator  # noqa: PLC0415
    from coterie.measure.budget import memory_budget  # noqa: PLC0415

    budget = memory_budget(None)
    small = budget.bytes < _SMALL_BUDGET_BYTES
    total = format_bytes(psutil.virtual_memory().total)
    enforced = _limit_is_enforced()
    tight = use_tight_allocator()
    return [
        Finding(topic="CPU", state="ok", found=_cores()),
        Finding(
            topic="memory",
            state="note" if small else "ok",
            found=f"a worker may use {format_bytes(budget.bytes)} of {total}: {budget.why}",
            advice="close other programs; torch alone takes about 330 MiB" if small else "",
        ),
        Finding(
            topic="memory limits",
            state="ok" if enforced else "note",
            found="can be enforced on a worker"
            if enforced
            else "cannot be enforced here: a budget is planned with only",
        ),
        Finding(
            topic="tight allocator",
            state="ok" if tight else "note",
            found="available" if tight else "not available (glibc only): peaks are higher and predicted less exactly",
        ),
    ]


def _senses() -> list[Finding]:
    """What a worker may know of its device: battery, energy, temperature, memory, its owner."""
    if importlib.util.find_spec("psutil") is None:
        return []
    from coterie.cli.doctor_senses import look_at_senses  # noqa: PLC0415 - as above

    return [
        Finding(topic=sense.topic, state="ok" if sense.there else "note", found=sense.found)
        for sense in look_at_senses()
    ]


def _cores() -> str:
    return f"{_usable_cores()} of {os.cpu_count()} cores usable, {platform.processor() or platform.machine()}"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _limit_is_enforced() -> bool:
    done = subprocess.run(  # noqa: S603 - our own interpreter and text
        [sys.executable, "-c", _LIMIT_PROBE], check=False, capture_output=True, timeout=60
    )
    return done.returncode == 0


def _devices() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch  # noqa: PLC0415 - seconds to import

    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        names.append("xpu")
    return [Finding(topic="compute devices", state="ok", found=", ".join(names))]


def _backends() -> list[Finding]:
    """Compute backends: tested here and now, so that what is listed computes rightly."""
    if any(importlib.util.find_spec(package) is None for package in ("torch", "numpy", "scipy")):
        return []
    from coterie.backends.catalog import find_backends  # noqa: PLC0415 - imports drivers

    found = find_backends(_usable_cores())
    findings = []
    for backend in found.backends:
        info = backend.info
        threads = f"{info.threads} threads, " if info.threads > 1 else "1 thread, " if info.threads else ""
        error = found.errors[info.name]
        where = f"{info.device} ({info.kind}), {info.driver}, {threads}self-test error {error:.1e}"
        findings.append(Finding(topic=f"backend {info.name}", state="ok", found=where))
        backend.close()
    for name, reason in found.absent.items():
        findings.append(Finding(topic=f"backend {name}", state="note", found=f"absent: {reason}"))
    return findings


def _folders() -> list[Finding]:
    return [
        _folder("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to a folder you may write to"),
        _folder("cache folder", cache_folder(), "set COTERIE_CACHE to a folder you may write to"),
    ]


def _folder(topic: str, folder: Path, advice: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(topic=topic, state="problem", found=f"{folder}: {error.strerror or error}", advice=advice)
    return Finding(topic=topic, state="ok", found=f"{folder} is writable")
