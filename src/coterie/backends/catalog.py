"""Which compute backends this device has: found by probing, tested before use, absent with a reason."""

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from coterie.backends.backend import Backend
from coterie.backends.driver_trial import crash_of
from coterie.backends.self_test import TOLERANCE, self_test
from coterie.errors import BackendError

MODULES = {
    "torch": "coterie.backends.torch_backend",
    "numpy": "coterie.backends.numpy_backend",
    "opencl": "coterie.backends.opencl_backend",
    "webgpu": "coterie.backends.webgpu_backend",
    "mnn": "coterie.backends.mnn_backend",
}
"""Module by name, in the order in which they are tried. Each has `probe(threads) -> Sequence[Backend]`, which raises
`BackendError` with the reason if its package or driver is absent."""

DRIVERS = frozenset({"opencl", "webgpu"})
"""Those that load a foreign driver into this process; it is tried in another one before."""


class _Module(Protocol):
    def probe(self, threads: int) -> Sequence[Backend]: ...


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a device has.

    Attributes:
        backends: Those that may be used, in the catalog's order.
        errors: Largest relative error of each in its self-test.
        absent: Why the others may not.
    """

    backends: tuple[Backend, ...]
    errors: dict[str, float]
    absent: dict[str, str]


def find_backends(threads: int, names: tuple[str, ...] | None = None) -> Found:
    """Probe and test backends.

    Args:
        threads: Compute threads that each may take of the processor.
        names: Which ones; None for all. `opencl` means all its devices, `opencl:1` one.

    Raises:
        BackendError: One that was named is unknown or absent.
    """
    modules = MODULES if names is None else _modules_of(names)
    backends: list[Backend] = []
    errors: dict[str, float] = {}
    absent: dict[str, str] = {}
    for name, module in modules.items():
        try:
            candidates = _probed(name, module, threads)
        except Exception as error:  # a driver may raise anything, and must not stop the others
            absent[name] = _reason(error)
            continue
        for backend in candidates:
            own = backend.info.name
            if names is not None and own not in names and name not in names:
                backend.close()
                continue
            reason = _tested(backend, errors)
            if reason:
                absent[own] = reason
                backend.close()
            else:
                backends.append(backend)
    try:
        _refuse_absent(names or (), backends, absent)
    except BackendError:
        for backend in backends:
            backend.close()
        raise
    return Found(backends=tuple(backends), errors=errors, absent=absent)


def _probed(name: str, module: str, threads: int) -> Sequence[Backend]:
    if name in DRIVERS and (crash := crash_of(module, threads)):
        raise BackendError(crash, hint="update or remove the driver")
    return cast("_Module", importlib.import_module(module)).probe(threads)


def _tested(backend: Backend, errors: dict[str, float]) -> str:
    """Why a backend may not be used, or nothing."""
    try:
        error = self_test(backend)
    except Exception as failure:  # as above
        return f"its self-test failed: {_reason(failure)}"
    errors[backend.info.name] = error
    return "" if error <= TOLERANCE else f"it computes wrongly: relative error {error:.1e} (at most {TOLERANCE:.0e})"


def _reason(error: Exception) -> str:
    if isinstance(error, BackendError):
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return f"{type(error).__name__}: {error}"


def _modules_of(names: tuple[str, ...]) -> dict[str, str]:
    unknown = [name for name in names if name.partition(":")[0] not in MODULES]
    if unknown:
        raise BackendError(f"there is no backend {unknown[0]}", hint=f"known are {', '.join(MODULES)}")
    families = {name.partition(":")[0] for name in names}
    return {name: module for name, module in MODULES.items() if name in families}


def _refuse_absent(names: tuple[str, ...], backends: list[Backend], absent: dict[str, str]) -> None:
    found = [backend.info.name for backend in backends]
    for name in names:
        if name not in found and not any(one.partition(":")[0] == name for one in found):
            reason = absent.get(name) or absent.get(name.partition(":")[0], "this device has none")
            raise BackendError(f"the backend {name} cannot be used: {reason}", hint="see `coterie doctor`")
