"""Writes down which devices join a run and what they can do. A list that cannot be written costs a log line, no run."""

import asyncio
from collections.abc import Callable, Iterable

from coterie.clock import Clock
from coterie.cluster.messages import Hello
from coterie.coordinator.device_list import DeviceList, KnownDevice
from coterie.coordinator.member import Member
from coterie.errors import StorageError
from coterie.logs import get_logger
from coterie.profiles.cluster_profile import DeviceProfile

log = get_logger(__name__)

HEARD_EVERY_S = 60.0


class Acquaintances:
    """See the module.

    Args:
        devices: The list.
        is_own: Whether it is a worker that the run itself has started here, which is no device.
        clock: Tells the date.
    """

    def __init__(self, devices: DeviceList, is_own: Callable[[Hello], bool], clock: Clock) -> None:
        self._devices = devices
        self._is_own = is_own
        self._clock = clock
        self._joinings: dict[str, Member] = {}

    def met(self, members: Iterable[Member]) -> None:
        """These have joined; to be told so twice of the same joining changes nothing."""
        now_s = self._clock.wall()
        for member in members:
            hello = member.hello
            if not hello.identity or self._is_own(hello) or self._joinings.get(hello.identity) is member:
                continue
            self._joinings[hello.identity] = member
            device = KnownDevice(
                identity=hello.identity,
                name=hello.name,
                first_seen_s=now_s,
                last_seen_s=now_s,
                device_type=hello.device_type,
                threads=hello.threads,
                memory_bytes=hello.memory_bytes,
                package_version=hello.package_version,
            )
            try:
                self._devices.saw(device)
            except StorageError as error:
                log.warning("%s", error.message)

    def heard(self, members: Iterable[Member]) -> None:
        """These are in, and speak."""
        identities = frozenset(
            member.hello.identity for member in members if member.hello.identity and not self._is_own(member.hello)
        )
        if not identities:
            return
        try:
            self._devices.heard(identities, self._clock.wall())
        except StorageError as error:
            log.info("%s", error.message)  # said aloud when they joined

    async def keep_hearing(self, members: Callable[[], Iterable[Member]]) -> None:
        """Write down every minute who is in, for ever; run it as a task. Who goes was heard of last about then."""
        while True:
            await asyncio.sleep(HEARD_EVERY_S)
            await asyncio.to_thread(self.heard, tuple(members()))

    def measured(self, member: Member, profile: DeviceProfile) -> None:
        """This one was measured."""
        try:
            self._devices.measured(
                member.hello.identity,
                flops_per_s=profile.flops_per_s,
                memory_bytes=profile.memory_bytes,
                at_s=profile.measured_at_s,
            )
        except StorageError as error:
            log.warning("%s", error.message)
