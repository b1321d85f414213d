"""A run's desk: knows how the run does, takes wishes of whoever holds the control token, and says where to ask."""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from coterie.cluster.fault_messages import Vitals
from coterie.coordinator.control import add_controls
from coterie.coordinator.control_file import Control, remove_control, this_process, write_control
from coterie.coordinator.member import Member
from coterie.coordinator.members import Members
from coterie.coordinator.observer import RunObserver
from coterie.coordinator.pausing import Pause
from coterie.coordinator.stopping import StopRequests
from coterie.ids import RunId, WorkerId
from coterie.metrics.records import AnyRecord
from coterie.metrics.status import DeviceStatus, RunPhase, RunStatus, StatusBook
from coterie.transport.addresses import own_addresses

if TYPE_CHECKING:
    from coterie.planner.plan import Plan

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound


class RunDesk:
    """See the module. It is made before the run, attached to its session, and open while the port is.

    Args:
        run: Which one.
        folder: Of the run: gets `control.json` while the port is open.
    """

    def __init__(self, run: RunId, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._token = secrets.token_urlsafe(32)
        self._book = StatusBook(str(folder.absolute()))
        self._news = ""
        self._members: Members | None = None
        self._stop = StopRequests()
        self._pausing = Pause()
        self.links: dict[WorkerId, str] = {}
        """How each stage reaches the next one, as its worker says."""

    def attach(self, app: web.Application, members: Members, stop: StopRequests, pausing: Pause) -> None:
        """Stand for a session; before its port is opened."""
        self._members, self._stop, self._pausing = members, stop, pausing
        add_controls(app, self, self._token)

    def open(self, listen_host: str | None, port: int, fingerprint: str) -> None:
        """The port is open: write down how to ask.

        Raises:
            StorageError: The run's folder cannot be written.
        """
        here, others = reachable(listen_host)
        machine, pid, began_s = this_process()
        control = Control(
            run=self._run,
            hosts=here,
            others=others,
            port=port,
            fingerprint=fingerprint,
            token=self._token,
            machine=machine,
            pid=pid,
            began_s=began_s,
        )
        write_control(self._folder, control)

    def close(self) -> None:
        """The port is about to close."""
        remove_control(self._folder, self._token)

    def watching(self, observer: RunObserver) -> RunObserver:
        """An observer that tells `observer` everything, and this desk what it needs."""
        return _Watcher(observer, self)

    def note(self, record: AnyRecord) -> None:
        """A record was made."""
        self._book.take(record)

    def hear(self, text: str) -> None:
        """Something was said to whoever watches the run."""
        if text.strip():
            self._news = text.strip().splitlines()[0]

    # ---- what may be asked: `Controls`

    def status(self) -> RunStatus:
        """See `Controls`."""
        found = self._book.status()
        return msgspec.structs.replace(
            found, run=self._run, phase=self._phase(found.phase), devices=self._devices(found.devices), news=self._news
        )

    def pause(self) -> None:
        """See `Controls`."""
        self._pausing.ask()

    def go_on(self) -> None:
        """See `Controls`."""
        self._pausing.end()

    def request_stop(self, *, now: bool) -> None:
        """See `Controls`. To ask twice for a stop with a checkpoint is no wish to stop without one."""
        if not self._stop.requested:
            self._stop.request()
            self._pausing.end()  # a run that rests does not come to its end
        if now:
            self._stop.request()

    def _phase(self, recorded: RunPhase) -> RunPhase:
        if self._stop.requested:
            return "stopping"
        if self._pausing.is_asked:
            return "paused" if self._pausing.is_resting else "pausing"
        return recorded

    def _devices(self, recorded: tuple[DeviceStatus, ...]) -> tuple[DeviceStatus, ...]:
        """The devices of the plan, then those that are in and have no stage, all with what they last said."""
        members = self._members.by_id if self._members is not None else {}
        placed = {device.worker for device in recorded}
        spare = tuple(
            DeviceStatus(worker=worker, name=member.hello.name)
            for worker, member in members.items()
            if worker not in placed
        )
        return tuple(self._with_vitals(device, members.get(WorkerId(device.worker))) for device in (*recorded, *spare))

    def _with_vitals(self, device: DeviceStatus, member: Member | None) -> DeviceStatus:
        if member is None:
            return device
        vitals = member.vitals or Vitals()
        return msgspec.structs.replace(
            device,
            battery=vitals.battery,
            on_power=vitals.on_power,
            watts=vitals.watts,
            joules=vitals.joules,
            watts_source=vitals.watts_source,
            celsius=vitals.celsius,
            link=self.links.get(member.worker, device.link),
            memory_bytes=device.memory_bytes or member.rss_bytes or None,
            limit_bytes=device.limit_bytes or member.hello.memory_bytes,
        )


class _Watcher:
    """A `RunObserver` that passes everything on."""

    def __init__(self, observer: RunObserver, desk: RunDesk) -> None:
        self._observer = observer
        self._desk = desk

    def joinable(self, join_link: str) -> None:
        self._observer.joinable(join_link)

    def notice(self, text: str) -> None:
        self._desk.hear(text)
        self._observer.notice(text)

    def planned(self, plan: "Plan", explanation: str, steps: int) -> None:
        self._observer.planned(plan, explanation, steps)

    def advanced(self, what: str, done: int, total: int) -> None:
        self._observer.advanced(what, done, total)

    def record(self, record: AnyRecord) -> None:
        self._desk.note(record)
        self._observer.record(record)


def reachable(listen_host: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where a coordinator that listens on this address is reached: from this machine, and from others."""
    if listen_host is None or listen_host in _EVERYWHERE:
        return ("127.0.0.1",), own_addresses(loopback=False)
    if listen_host in _LOOPBACK:
        return (listen_host,), ()
    return (listen_host,), (listen_host,)
