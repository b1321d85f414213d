"""What can happen to a device, or to the coordinator, in the middle of a run; and how it ends."""

import time
from collections.abc import Callable

import msgspec

from testbed.bed import Bed
from testbed.host import SLOW, Host

FREEZE_S = 60.0
CUT_S = 20.0
RESTART_S = 3.0
"""Until a killed worker is started again, or a device that has left comes back."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of trouble.

    Attributes:
        name: For tables.
        strike: Lets it happen.
        mend: Ends it; the device then may come back.
        mend_after_s: How long it lasts.
    """

    name: str
    strike: Callable[[Bed, Host], None]
    mend: Callable[[Bed, Host], None]
    mend_after_s: float


def _kill(_: Bed, host: Host) -> None:
    host.kill()


def _start_again(_: Bed, host: Host) -> None:
    if not host.runs:
        host.start()


def _freeze(_: Bed, host: Host) -> None:
    host.freeze()


def _thaw(_: Bed, host: Host) -> None:
    host.thaw()


def _cut(_: Bed, host: Host) -> None:
    host.cut()


def _restore(_: Bed, host: Host) -> None:
    host.restore()


def _slow(_: Bed, host: Host) -> None:
    host.shape(SLOW)


def _fast(_: Bed, host: Host) -> None:
    host.shape(host.settings.shape)


def _take_memory(bed: Bed, host: Host) -> None:
    """Leave it half of what its stage adds to an idle worker."""
    assert bed.coordinator is not None
    stages = bed.coordinator.events.of("plan")[-1]["stages"]
    memory = next(stage["memory"] for stage in stages if stage["worker"] == host.name)
    host.take_memory((memory["base"] + memory["total"]) // 2)


def _give_memory(_: Bed, host: Host) -> None:
    host.give_memory()


def _empty_battery(_: Bed, host: Host) -> None:
    host.charge("5%")


def _charged(bed: Bed, host: Host) -> None:
    host.charge("90%,plugged")
    _start_again(bed, host)


def _leave(_: Bed, host: Host) -> None:
    host.ask_to_end()


def _kill_coordinator(bed: Bed, _: Host) -> None:
    """With everything it has in memory; it is started again at once, as a service would be."""
    assert bed.coordinator is not None
    bed.coordinator.kill()
    time.sleep(RESTART_S)
    bed.coordinator.start(resume=True)


def _nothing(_: Bed, __: Host) -> None:
    pass


FAULTS = (
    Fault(name="kill -9", strike=_kill, mend=_start_again, mend_after_s=RESTART_S),
    Fault(name="SIGSTOP 60 s", strike=_freeze, mend=_thaw, mend_after_s=FREEZE_S),
    Fault(name="link cut", strike=_cut, mend=_restore, mend_after_s=CUT_S),
    Fault(name="link at 5 Mbit/s", strike=_slow, mend=_fast, mend_after_s=CUT_S),
    Fault(name="memory taken", strike=_take_memory, mend=_give_memory, mend_after_s=CUT_S),
    Fault(name="battery low", strike=_empty_battery, mend=_charged, mend_after_s=CUT_S),
    Fault(name="clean leave", strike=_leave, mend=_start_again, mend_after_s=CUT_S),
    Fault(name="coordinator killed", strike=_kill_coordinator, mend=_nothing, mend_after_s=0.0),
)
"""In the order of the fault matrix."""
