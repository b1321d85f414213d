"""Devices that have joined this user's runs: what they are, what they can do, when they were last seen. No secrets."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from coterie.errors import StorageError, UsageError
from coterie.profiles.cluster_profile import DeviceType
from coterie.transport.private_files import write_private
from coterie.transport.user_settings import config_folder

DEVICES_FILE = "devices.json"
MOST_DEVICES = 500
"""Further ones take the place of those that were not seen for longest."""

_SHORTEST_PREFIX = 4
_LOCK_S = 5.0


class KnownDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device.

    Attributes:
        identity: Its public key, 64 hex digits.
        name: As its owner calls it; `alias` as this user does, if differently.
        first_seen_s, last_seen_s: In seconds since 1970; of a device that is in a run, to the minute.
        joined: How often.
        memory_bytes: What it offered when it was last seen.
        flops_per_s: Its speed in a plain matrix product when it was last measured; 0: never.
        measured_at_s: By the device's own clock; 0 if that is not known.
    """

    identity: str
    name: str
    alias: str = ""
    first_seen_s: float
    last_seen_s: float
    joined: int = 1
    device_type: DeviceType = "cpu"
    threads: int = 1
    memory_bytes: int = 0
    flops_per_s: float = 0.0
    measured_at_s: float = 0.0
    package_version: str = ""

    @property
    def title(self) -> str:
        """What to call it."""
        return self.alias or self.name


class _File(msgspec.Struct, frozen=True, kw_only=True):
    devices: tuple[KnownDevice, ...] = ()


class DeviceList:
    """The list, in a file that several runs may write at once.

    Args:
        folder: Where it is; None: with this user's other settings.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (config_folder() if folder is None else folder) / DEVICES_FILE

    def all(self) -> tuple[KnownDevice, ...]:
        """Every device, the one that was seen last first.

        Raises:
            StorageError: The file cannot be read.
        """
        return tuple(sorted(self._read(), key=lambda device: -device.last_seen_s))

    def saw(self, device: KnownDevice) -> None:
        """A device has joined; what is known of it from before is kept where `device` does not say it.

        Raises:
            StorageError: The file cannot be read or written.
        """

        def merge(devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
            before = next((known for known in devices if known.identity == device.identity), None)
            merged = device if before is None else _merged(before, device)
            others = sorted((d for d in devices if d.identity != device.identity), key=lambda d: d.last_seen_s)
            return (*others[-(MOST_DEVICES - 1) :], merged)

        self._change(merge)

    def heard(self, identities: Collection[str], at_s: float) -> None:
        """Devices that have joined were heard of; those that are not on the list any more stay off it.

        Raises:
            StorageError: The file cannot be read or written.
        """

        def note(device: KnownDevice) -> KnownDevice:
            if device.identity not in identities:
                return device
            return msgspec.structs.replace(device, last_seen_s=max(at_s, device.last_seen_s))

        self._change(lambda devices: tuple(map(note, devices)))

    def measured(self, identity: str, *, flops_per_s: float, memory_bytes: int, at_s: float) -> None:
        """A device that has joined was measured.

        Raises:
            StorageError: The file cannot be read or written.
        """

        def note(device: KnownDevice) -> KnownDevice:
            if device.identity != identity:
                return device
            return msgspec.structs.replace(
                device, flops_per_s=flops_per_s, memory_bytes=memory_bytes, measured_at_s=at_s
            )

        self._change(lambda devices: tuple(map(note, devices)))

    def forget(self, name: str) -> KnownDevice:
        """Take a device off the list; it is as if it had never joined.

        Raises:
            UsageError: No device is called so, or several are.
            StorageError: The file cannot be read or written.
        """
        gone = find(self.all(), name)
        self._change(lambda devices: tuple(device for device in devices if device.identity != gone.identity))
        return gone

    def rename(self, name: str, alias: str) -> KnownDevice:
        """Call a device differently from its owner; an empty `alias` ends that.

        Raises:
            UsageError: No device is called so, or several are, or another one has the new name.
            StorageError: The file cannot be read or written.
        """
        known = self.all()
        found = find(known, name)
        if any(device.title == alias and device.identity != found.identity for device in known):
            raise UsageError(f"another device is called {alias!r}", hint="choose another name")
        renamed = msgspec.structs.replace(found, alias=alias)
        self._change(lambda devices: tuple(renamed if d.identity == found.identity else d for d in devices))
        return renamed

    def _change(self, change: Callable[[tuple[KnownDevice, ...]], tuple[KnownDevice, ...]]) -> None:
        with self._held():
            after = change(self._read())
            try:
                write_private(self.path, msgspec.json.format(msgspec.json.encode(_File(devices=after))))
            except OSError as error:
                raise self._unusable(error.strerror or str(error)) from error

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        lock = FileLock(self.path.with_name(self.path.name + ".lock"), timeout=_LOCK_S)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire()
        except Timeout as error:
            raise self._unusable("another process has it") from error
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        try:
            yield
        finally:
            lock.release()

    def _read(self) -> tuple[KnownDevice, ...]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_File).devices
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            raise self._unusable(str(error)) from error

    def _unusable(self, why: str) -> StorageError:
        return StorageError(
            f"the list of known devices {self.path} cannot be read or written: {why}",
            hint="delete it for an empty list, or set COTERIE_CONFIG to a writable folder",
        )


def find(devices: tuple[KnownDevice, ...], name: str) -> KnownDevice:
    """The device that is called so, or whose identity begins so.

    Raises:
        UsageError: There is none, or several.
    """
    found = [device for device in devices if device.title == name]
    if not found and len(name) >= _SHORTEST_PREFIX:
        found = [device for device in devices if device.identity.startswith(name.rstrip("…").lower())]
    if not found:
        names = ", ".join(device.title for device in devices) or "none"
        raise UsageError(f"no known device is called {name!r}", hint=f"known are: {names}")
    if len(found) > 1:
        digits = ", ".join(device.identity[:12] for device in found)
        raise UsageError(f"{len(found)} known devices are called {name!r}", hint=f"give its identity instead: {digits}")
    return found[0]


def _merged(before: KnownDevice, now: KnownDevice) -> KnownDevice:
    return msgspec.structs.replace(
        now,
        alias=before.alias,
        first_seen_s=before.first_seen_s,
        joined=before.joined + now.joined,
        flops_per_s=now.flops_per_s or before.flops_per_s,
        measured_at_s=now.measured_at_s or before.measured_at_s,
    )
