"""A run that goes on, or has ended, seen and controlled from another process, on this machine or on another one."""

from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
from filelock import FileLock, Timeout

from coterie.checkpoint.names import checkpoint_folder, replica_folder, saved_steps
from coterie.cluster.control_messages import Refusal, StopWish
from coterie.coordinator.control_file import read_control
from coterie.coordinator.run_folder import EVENTS, LOCK, MODEL, RECIPE, SUMMARY
from coterie.errors import (
    ControlRefusedError,
    CoterieError,
    NetworkError,
    NoSuchRunError,
    NotRunningError,
    ProtocolError,
    error_from_slug,
)
from coterie.metrics.events import read_events
from coterie.metrics.status import RunPhase, RunStatus, StatusBook
from coterie.transport.control_link import control_link, parse_control_link
from coterie.transport.pinned_https import Answer, request

_Answer = TypeVar("_Answer", RunStatus, Refusal)


class RunControl:
    """One run, by its folder on this machine or by its control link.

    Args:
        folder: The run's folder.
        link: The control link, as `coterie status --show-link` prints it; then there is no folder.
    """

    def __init__(self, folder: str | Path | None = None, *, link: str | None = None) -> None:
        self.folder = None if link is not None else Path(folder or "runs/latest")
        self._link = None if link is None else parse_control_link(link)

    def status(self) -> RunStatus:
        """How the run does; of one that has ended, how it ended.

        Raises:
            NoSuchRunError: The folder holds no run.
            NetworkError: The coordinator does not answer, and nothing says that it has ended.
            ControlRefusedError: The link's token is not the run's.
        """
        try:
            return self._ask("GET", "/v1/status")
        except NotRunningError:
            assert self.folder is not None
            return recorded_status(self.folder)

    def pause(self) -> RunStatus:
        """Let it rest after the step that is under way; its devices stay joined.

        Raises:
            NotRunningError: It has ended.
            ControlRefusedError: It cannot be paused; the message says why.
        """
        return self._ask("POST", "/v1/pause")

    def go_on(self) -> RunStatus:
        """End a pause.

        Raises:
            NotRunningError: It has ended.
        """
        return self._ask("POST", "/v1/continue")

    def stop(self, *, now: bool = False) -> RunStatus:
        """End the run with a checkpoint where its pipeline is next empty, or at once without one.

        Raises:
            NotRunningError: It has ended.
        """
        return self._ask("POST", "/v1/stop", msgspec.json.encode(StopWish(now=now)))

    def link(self) -> str:
        """What another machine controls this run by; a secret.

        Raises:
            NotRunningError: It has ended.
            ControlRefusedError: The run can only be reached from its own machine.
        """
        if self._link is not None:
            return control_link(self._link)
        assert self.folder is not None
        control = read_control(self.folder)
        if control is None or control.is_gone:
            self._not_running(self.folder)
        if not control.others:
            raise ControlRefusedError(
                "the run listens on this machine only: no other one can control it",
                hint="start it with --host 0.0.0.0 (or an address of this machine), or run the command over ssh",
            )
        return control_link(msgspec.structs.replace(control.endpoint, hosts=control.others))

    def _ask(self, method: str, path: str, body: bytes = b"") -> RunStatus:
        answer = self._answer(method, path, body)
        if answer.status == 401:
            raise ControlRefusedError(
                "the run does not know this control token",
                hint="each start of a coordinator makes a new one: take the link that `coterie status --show-link` "
                "prints now",
            )
        if answer.status == 409:
            refusal = _decoded(answer.body, Refusal)
            raise error_from_slug(refusal.slug, refusal.message, refusal.hint)
        if answer.status != 200:
            raise ProtocolError(
                f"the coordinator answered {method} {path} with HTTP status {answer.status}",
                hint="is it of another version of coterie?",
            )
        return _decoded(answer.body, RunStatus)

    def _answer(self, method: str, path: str, body: bytes) -> Answer:
        if self._link is not None:
            return request(self._link, method, path, body=body)
        assert self.folder is not None
        control = read_control(self.folder)
        if control is None:
            self._not_running(self.folder)
        try:
            return request(control.endpoint, method, path, body=body)
        except (NetworkError, ControlRefusedError) as error:
            if read_control(self.folder) != control or control.is_gone:  # it has ended, maybe while it was asked
                self._not_running(self.folder)
            raise _unreachable(error, control.machine) from error

    def _not_running(self, folder: Path) -> NoReturn:
        status = recorded_status(folder)
        raise NotRunningError(f"the run in {folder} {ending(status, folder)}", hint=next_step(status, folder))


def recorded_status(folder: Path) -> RunStatus:
    """How a run that nobody answers for stands, by what it has left in its folder.

    Raises:
        NoSuchRunError: The folder holds no run.
        DataError: Its events cannot be read.
    """
    if not any((folder / name).exists() for name in (EVENTS, RECIPE)) and not _is_held(folder):
        what = "holds no run" if folder.is_dir() else "does not exist"
        raise NoSuchRunError(
            f"there is no run here: the folder {folder} {what}",
            hint="give the run's folder (its recipe's output), or `--link` for a run of another machine",
        )
    book = StatusBook(str(folder.absolute()))
    if (folder / EVENTS).exists():
        book.take_all(read_events(folder / EVENTS))
    found = book.status()
    return msgspec.structs.replace(found, phase=_phase(folder, found.phase))


def _phase(folder: Path, recorded: RunPhase) -> RunPhase:
    if recorded == "saving" and (folder / SUMMARY).exists():
        return "finished"
    if _is_held(folder):  # what ended before this process took the folder is past
        return "saving" if recorded == "saving" else "preparing"
    if recorded in ("stopped", "failed"):
        return recorded
    return "killed" if read_control(folder) is not None else "stopped"


def _is_held(folder: Path) -> bool:
    """Whether a process has this folder's run in hand."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except (Timeout, OSError):
        return True
    lock.release()
    return False


def ending(status: RunStatus, folder: Path) -> str:
    """What happened to a run that does not answer, to follow "the run in FOLDER"."""
    where = f"after step {status.step} of {status.total_steps}" if status.total_steps else "before its first step"
    match status.phase:
        case "finished":
            return (
                f"has finished: {status.step} of {status.total_steps} steps are done; its model is in {folder / MODEL}"
            )
        case "failed":
            return f"ended with an error {where}: {status.fault}"
        case "killed":
            return f"is not going on: its process was killed, or its machine switched off, {where}"
        case "preparing" | "saving":
            return f"takes no wishes now: it is {status.phase}"
        case _:
            return f"was stopped {where}"


def next_step(status: RunStatus, folder: Path) -> str:
    """What to do about a run that has ended."""
    if status.phase in ("preparing", "saving"):
        return "wait a moment"
    if status.phase == "finished":
        return ""
    steps = sorted((*saved_steps(checkpoint_folder(folder)), *saved_steps(replica_folder(folder))))
    if not steps:
        return f"it left no checkpoint: `coterie train {folder / RECIPE}` begins anew"
    return f"`coterie train {folder / RECIPE} --resume` goes on from the checkpoint of step {steps[-1]}"


def _unreachable(error: CoterieError, machine: str) -> CoterieError:
    return type(error)(
        error.message,
        hint=f"the run is of the machine {machine}: ask there, or give the link that `coterie status --show-link` "
        "prints there by --link",
    )


def _decoded(body: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"the coordinator's answer cannot be understood: {error}", hint="is it of another version of coterie?"
        ) from error
