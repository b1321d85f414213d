"""A worker's stage of one plan: assigned, filled with weights, built, run, and given up for another."""

import asyncio
from collections.abc import Callable

from torch import Tensor

from coterie.cluster.messages import (
    BATCH,
    DONE,
    GRADIENT,
    HIDDEN,
    TIED,
    Assign,
    Generate,
    NormTotal,
    RunSegment,
    SaveState,
    unpack,
)
from coterie.errors import CoterieError, ProtocolError
from coterie.ids import WorkerId
from coterie.logs import get_logger
from coterie.planner.explain import name_units
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame
from coterie.worker.mailbox import Mailbox
from coterie.worker.network_ports import NORM_TOTAL, Place
from coterie.worker.outboxes import Outboxes
from coterie.worker.own_device import OwnDevice
from coterie.worker.side_ports import make_ports
from coterie.worker.stage_runner import StageRunner

log = get_logger(__name__)

COMPUTE_END_S = 20.0
"""How long the compute thread has to come out of what it does; ending the process under it would crash it."""

_DATA_KINDS = (BATCH, HIDDEN, GRADIENT, DONE, TIED)


class Seat:
    """Lives on the event loop; what it computes is done in a thread of its own.

    Args:
        worker: This worker's name in the run.
        assign: Which stage of which plan.
        device: What it computes with.
        outboxes: Its ways to the others.
        on_failure: Called once, from the compute thread, with what ended it.
    """

    def __init__(
        self,
        worker: WorkerId,
        assign: Assign,
        device: OwnDevice,
        outboxes: Outboxes,
        *,
        on_failure: Callable[[CoterieError], None],
    ) -> None:
        place = assign.plan.stages[assign.stage]
        self.assign = assign
        self._worker = worker
        self._device = device
        self._outboxes = outboxes
        self._on_failure = on_failure
        self._mailbox = Mailbox()
        self._runner: StageRunner | None = None
        self._tensors: dict[str, Tensor] = {}
        self._units_missing = set(range(place.first_unit, place.stop_unit))

    @property
    def layers(self) -> str:
        """What it holds, for people."""
        place = self.assign.plan.stages[self.assign.stage]
        units = name_units(place.first_unit, place.stop_unit, self.assign.plan.units)
        return f"stage {self.assign.stage} of {len(self.assign.plan.stages)}: {units}"

    @property
    def is_built(self) -> bool:
        """Whether it can be given work."""
        return self._runner is not None

    def take_weights(self, frame: Frame) -> bool:
        """Take one unit's tensors; whether they were the last ones.

        Raises:
            ProtocolError: The stage did not wait for them.
        """
        unit = getattr(unpack(frame.header.body), "unit", None)
        if unit not in self._units_missing:
            raise ProtocolError("weights came that this stage did not wait for")
        for spec, buffer in zip(frame.header.tensors, frame.buffers, strict=True):
            self._tensors[spec.name] = decode(spec, buffer)
        self._units_missing.discard(unit)
        return not self._units_missing

    async def build(self) -> None:
        """Build the stage from the weights that have come.

        Raises:
            CoterieError: They are not those of the stage, or memory ran out.
        """
        assign = self.assign
        tensors, self._tensors = self._tensors, {}
        place = Place(
            run=assign.run, worker=self._worker, plan=assign.plan, stage=assign.stage, tied_peer=assign.tied_peer
        )
        self._runner = StageRunner(self._worker, assign, self._device.settings, self._outboxes.to, self._on_failure)
        rows = -(-assign.plan.batch_rows // assign.plan.micro_batches)
        self._runner.sharing = self._device.sharing_at(rows)
        ports = make_ports(assign, place, self._mailbox, self._outboxes.to)
        await asyncio.to_thread(self._runner.build, tensors, ports)

    def submit(self, job: RunSegment | Generate | SaveState) -> None:
        """Queue a job behind those before it."""
        assert self._runner is not None
        self._runner.submit(job)

    def put_total(self, message: NormTotal, frame: Frame) -> None:
        """Hand the stage the gradient norm that it waits for."""
        self._mailbox.put((NORM_TOTAL, message.step, 0), frame)

    def take_data(self, frame: Frame) -> None:
        """Hand the stage what a neighbour or the coordinator sent; what belongs to another run or plan is dropped.

        Raises:
            ProtocolError: There is no such kind of frame.
        """
        header = frame.header
        if (header.run, header.plan_version) != (self.assign.run, self.assign.plan.version):
            log.info("a %s frame of another run or plan was dropped", header.kind)
        elif header.kind in _DATA_KINDS:
            self._mailbox.put((header.kind, header.step, header.micro_batch), frame)
        else:
            raise ProtocolError(f"{header.source or 'a peer'} sent a frame of kind {header.kind[:40]!r}")

    def has_neighbour(self, worker: WorkerId) -> bool:
        """Whether another stage of the plan is that worker's."""
        return any(stage.worker == worker for stage in self.assign.plan.stages)

    def wake(self, error: CoterieError) -> None:
        """Wake the compute thread, should it wait for a frame or for room to send."""
        self._mailbox.fail(error)
        self._outboxes.fail(error)

    async def end(self, error: CoterieError) -> None:
        """Let the compute thread end after what it does now, and wait for that."""
        self.wake(error)
        if self._runner is not None:
            await asyncio.to_thread(self._runner.end, COMPUTE_END_S)
        self._outboxes.abandon(error)
