"""The trained state that a worker keeps for the next plan: its own stage's, and that of the stage beside it.

The coordinator has all of it. What is here need not travel again when a worker is lost: the stages of the next plan
begin with the copies that they hold, once these have been found to be the very state that the coordinator goes on from.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from coterie.checkpoint.shard_file import check_tensors, found_in
from coterie.cluster.messages import Assign, UnitBody, unpack
from coterie.errors import ProtocolError
from coterie.logs import get_logger
from coterie.models.anatomy import describe
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame
from coterie.units import MIB
from coterie.worker.copy_store import IN_MEMORY_BYTES, CopyFolder, CopyStore
from coterie.worker.trained_state import UnitTensors, copied, size_bytes

log = get_logger(__name__)

UNWRITTEN_BYTES = 16 * MIB
"""Copies of others that wait for a slow disk; what comes beyond that is not kept."""


class TrainedCopies:
    """Copies outlive the stages that they are of; those of a neighbour cannot push out the worker's own.

    Args:
        folder: For what is too much for memory; None: that is not kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = CopyFolder(folder)
        self.own = CopyStore(self._folder)
        self.others = CopyStore(self._folder)
        self._assign: Assign | None = None
        self._writer = _writer()
        self._unwritten_bytes = 0
        self._counting = threading.Lock()

    def begin(self, assign: Assign) -> None:
        """A stage of another plan begins."""
        self._assign = assign
        for store in (self.own, self.others):
            store.begin(assign.resumed_step, assign.copies.limit_bytes)
        if assign.copies.sources and assign.copies.limit_bytes > IN_MEMORY_BYTES:
            # Its thread begins now: once a stage has taken the memory, to start one might wait for ever.
            self._writer.submit(int)

    def found(self, assign: Assign) -> dict[int, dict[str, Tensor]]:
        """The trained state that a stage begins with, by unit, as far as it is here. Takes its time: it hashes."""
        found = {}
        for wanted in assign.copies.begins_with:
            for store in (self.own, self.others):
                tensors = store.find(assign.resumed_step, wanted.unit, wanted.digest)
                if tensors is not None:
                    found[wanted.unit] = tensors
                    break
        return found

    def keep_own(self, step: int, units: UnitTensors, *, are_live: bool) -> None:
        """Keep the state of the worker's own stage after `step` steps; called from its compute thread.

        Args:
            step: Optimizer steps done.
            units: The tensors.
            are_live: They will be changed by the next update; where there are too many to copy them in memory, they
                are written to the disk.
        """
        units = {unit: tensors for unit, tensors in units.items() if self.own.lacks(step, unit)}
        if are_live and self.own.is_quick(size_bytes(units)):
            units, are_live = copied(units), False
        for unit, tensors in units.items():
            self.own.put(step, unit, tensors, are_own=not are_live)

    def take(self, frame: Frame) -> None:
        """Keep what another worker has sent; what is not as it should be is dropped, and harms nobody.

        A copy that was sent wrong on purpose is not the coordinator's state: `found` does not find it. Called from the
        event loop, which waits for no disk.
        """
        assign = self._assign
        if assign is None:
            return
        try:
            unit, tensors = _checked(frame, assign)
        except ProtocolError as error:
            log.warning("a copy from %s was dropped: %s", frame.header.source, error.message)
            return
        step, nbytes = frame.header.step, size_bytes({unit: dict(tensors)})
        if not self.others.lacks(step, unit):
            return
        if self.others.is_quick(nbytes):
            self.others.put(step, unit, tensors)
        elif self._may_wait(nbytes):
            place = (step, unit)
            self._writer.submit(self._write, assign, place, tensors, nbytes).add_done_callback(_written)
        else:
            log.info("a copy of unit %d after %d steps is not kept: the disk is too slow", unit, step)

    def _may_wait(self, nbytes: int) -> bool:
        """Whether so much more may wait for the disk; one copy alone always may."""
        with self._counting:
            if self._unwritten_bytes and self._unwritten_bytes + nbytes > UNWRITTEN_BYTES:
                return False
            self._unwritten_bytes += nbytes
            return True

    def _write(self, assign: Assign, place: tuple[int, int], tensors: Mapping[str, Tensor], nbytes: int) -> None:
        try:
            if assign is self._assign:  # else it is of a plan that is over
                self.others.put(*place, tensors)
        finally:
            with self._counting:
                self._unwritten_bytes -= nbytes

    def committed(self, step: int) -> None:
        """The coordinator has the whole state after `step` steps."""
        self.own.committed(step)
        self.others.committed(step)

    def clear(self) -> None:
        """Keep nothing any more."""
        self._assign = None
        self._writer.shutdown(cancel_futures=True)
        self._writer, self._unwritten_bytes = _writer(), 0
        self.own.clear()
        self.others.clear()
        self._folder.remove()


def _writer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")


def _written(future: "Future[None]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("a copy was not kept: %s: %s", type(error).__name__, error)


def _checked(frame: Frame, assign: Assign) -> tuple[int, Mapping[str, Tensor]]:
    """A copy's unit and its tensors.

    Raises:
        ProtocolError: They are not the trained tensors of a unit of the sender's stage.
    """
    header = frame.header
    body = unpack(header.body)
    if not isinstance(body, UnitBody):
        raise ProtocolError("it does not say of which unit it is")
    places = [place for place in assign.plan.stages if place.worker == header.source]
    if not any(place.first_unit <= body.unit < place.stop_unit for place in places):
        raise ProtocolError(f"unit {body.unit} is not the sender's")
    anatomy = describe(assign.spec)
    shapes = {name: anatomy.shapes[name] for name in anatomy.trainable[body.unit]}
    if not shapes:  # a copy of nothing fills no room, so there could be any number of them
        raise ProtocolError(f"unit {body.unit} has nothing that is trained")
    pairs = zip(header.tensors, frame.buffers, strict=True)
    tensors = {spec.name: decode(spec, buffer) for spec, buffer in pairs}
    check_tensors(body.unit, found_in(tensors), shapes)
    return body.unit, tensors
