"""OpenCL's drivers: which devices they offer, and their errors as this project's."""

import contextlib
from collections.abc import Iterator
from typing import Any

from coterie.errors import BackendError


@contextlib.contextmanager
def driver_errors(name: str) -> Iterator[None]:
    """What the driver of the backend `name` raises is the backend's failure."""
    import pyopencl as cl  # noqa: PLC0415 - absent on most devices

    try:
        yield
    except (cl.Error, MemoryError) as error:
        raise BackendError(f"{name}: the OpenCL driver failed: {error}") from error


def find_devices() -> list[Any]:
    """The devices of all platforms, processors last.

    Raises:
        BackendError: pyopencl or a driver is absent.
    """
    try:
        import pyopencl as cl  # noqa: PLC0415 - absent on most devices
    except ImportError as error:
        raise BackendError(
            f"opencl: pyopencl cannot be imported ({error})", hint="pip install 'coterie[backends]'"
        ) from error
    hint = "install a driver: pocl-opencl-icd for processors, or that of the GPU's maker"
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise BackendError(f"opencl: no platform was found ({error})", hint=hint) from error
    devices: list[Any] = []
    seen: set[str] = set()
    for platform in platforms:
        if platform.name in seen:  # two installations of PoCL show the same processor twice
            continue
        with contextlib.suppress(cl.Error):  # a platform without devices says so by an error
            found = platform.get_devices()
            seen.add(platform.name)
            devices += found
    if not devices:
        raise BackendError("opencl: its platforms have no device", hint=hint)
    devices.sort(key=lambda device: bool(device.type & cl.device_type.CPU))
    return devices
