"""A worker's stage of one plan: assigned, filled with weights, built, run, and given up for another."""

import asyncio
from collections.abc import Callable, Mapping

from torch import Tensor

from coterie.cluster.fault_messages import REPLICA
from coterie.cluster.messages import (
    BATCH,
    DONE,
    GRADIENT,
    HIDDEN,
    PARAMETER,
    TIED,
    Assign,
    Generate,
    NormTotal,
    RunSegment,
    SaveState,
    unpack,
)
from coterie.errors import CoterieError, ProtocolError
from coterie.ids import COORDINATOR, WorkerId
from coterie.logs import get_logger
from coterie.models.anatomy import describe
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame
from coterie.units import name_units
from coterie.worker.holdings import Holdings, trained_names, wanted_names
from coterie.worker.mailbox import Mailbox
from coterie.worker.network_ports import NORM_TOTAL, Place
from coterie.worker.outboxes import Outboxes
from coterie.worker.own_device import OwnDevice
from coterie.worker.side_ports import make_ports
from coterie.worker.stage_runner import StageRunner
from coterie.worker.stall import Block
from coterie.worker.superseded import SupersededError

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
        holdings: Frozen tensors that are here already; those of the built stage take their place.
        on_failure: Called once, from the compute thread, with what ended it.
    """

    def __init__(
        self,
        worker: WorkerId,
        assign: Assign,
        device: OwnDevice,
        outboxes: Outboxes,
        *,
        holdings: Holdings,
        on_failure: Callable[[CoterieError], None],
    ) -> None:
        place = assign.plan.stages[assign.stage]
        self.assign = assign
        self._worker = worker
        self._device = device
        self._outboxes = outboxes
        self._holdings = holdings
        self._on_failure = on_failure
        self._mailbox = Mailbox()
        self._runner: StageRunner | None = None
        self._tensors: dict[str, Tensor] = {}
        self._units = range(place.first_unit, place.stop_unit)
        self._missing = {unit: self._wanted(unit) for unit in self._units}

    def _wanted(self, unit: int) -> set[str]:
        names = trained_names if unit in self._holdings.units else wanted_names
        return set(names(self.assign.spec, unit))

    @property
    def version(self) -> int:
        """Of its plan."""
        return self.assign.plan.version

    @property
    def is_filled(self) -> bool:
        """Whether all its weights are here."""
        return not any(self._missing.values())

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

    def take_weights(self, frame: Frame) -> None:
        """Take tensors of one unit.

        Raises:
            ProtocolError: The stage did not wait for them.
        """
        pairs = zip(frame.header.tensors, frame.buffers, strict=True)
        self.take_tensors(
            getattr(unpack(frame.header.body), "unit", -1), {spec.name: decode(spec, buffer) for spec, buffer in pairs}
        )

    def take_tensors(self, unit: int, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors of one unit, named as they travel, wherever they are from; see `take_weights`."""
        missing = self._missing.get(unit)
        if missing is None or (tensors and not missing):
            raise ProtocolError("weights came that this stage did not wait for")
        for name, tensor in tensors.items():
            self._tensors[name] = tensor
            missing.discard(name.removeprefix(PARAMETER))

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
        if self._runner.sharing is not None:
            self._runner.sharing.repeats_steps(on=assign.side is None and assign.plan.schedule != "forward")
        if assign.replicate_every:
            receivers = {COORDINATOR, assign.copies.peer} & {COORDINATOR, *self._outboxes.direct}
            self._runner.replica_outboxes = self._outboxes.aside(receivers)
            self._runner.copies = self._holdings.trained
        ports = make_ports(assign, place, self._mailbox, self._outboxes.to)
        received = {name.removeprefix(PARAMETER): tensor for name, tensor in tensors.items()}
        buffers = {name: received[name] for name in describe(assign.spec).buffers if name in received}
        held = dict(self._holdings.tensors)
        await asyncio.to_thread(self._runner.build, tensors, held, ports)
        buffers |= {name: held[name] for name in describe(assign.spec).buffers if name in held}
        self._holdings.hold(assign.spec, self._units, buffers | self._runner.frozen)

    @property
    def is_running(self) -> bool:
        """Whether the stage stands, so that it can be adapted."""
        return self._runner is not None and self._runner.is_running

    @property
    def block(self) -> Block | None:
        """See `StageRunner.block`."""
        return None if self._runner is None else self._runner.block

    @property
    def recomputes(self) -> bool:
        """See `StageRunner.recomputes`."""
        return self._runner is not None and self._runner.recomputes

    def adapt(self, *, recompute: bool, in_flight: int) -> None:
        """See `StageRunner.adapt`."""
        if self._runner is not None:
            self._runner.adapt(recompute=recompute, in_flight=in_flight)

    def set_speed(self, speed: float) -> None:
        """See `StageRunner.set_speed`."""
        if self._runner is not None:
            self._runner.set_speed(speed)

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
        elif header.kind in (*_DATA_KINDS, REPLICA) and header.source not in self._sources(header.kind):
            log.info("a %s frame from %s, which has no business sending it, was dropped", header.kind, header.source)
        elif header.kind in _DATA_KINDS:
            self._mailbox.put((header.kind, header.step, header.micro_batch), frame)
        elif header.kind == REPLICA:
            self._holdings.trained.take(frame)
        else:
            raise ProtocolError(f"{header.source or 'a peer'} sent a frame of kind {header.kind[:40]!r}")

    def _sources(self, kind: str) -> set[WorkerId]:
        """Who may send them: the coordinator batches, the stage before hidden states, the one after gradients."""
        stages, own = self.assign.plan.stages, self.assign.stage
        if kind == REPLICA:
            return {*self.assign.copies.sources}
        if kind == BATCH:
            return {COORDINATOR}
        if kind == TIED:
            return {self.assign.tied_peer}
        beside = own - 1 if kind == HIDDEN else own + 1
        return {stages[beside].worker} if 0 <= beside < len(stages) else set()

    def talks_to(self, worker: WorkerId) -> bool:
        """Whether the stage's own data goes to that worker or comes from it."""
        stages, own = self.assign.plan.stages, self.assign.stage
        around = {stage.worker for stage in stages[max(own - 1, 0) : own + 2]}
        return worker in around | {self.assign.tied_peer}

    def wake(self) -> None:
        """Let the compute thread come to its end; what it has posted still goes out."""
        over = SupersededError("the stage is given up")
        self._mailbox.close(over)
        self._outboxes.fail(over)

    async def end(self, patience_s: float = COMPUTE_END_S) -> bool:
        """Let the compute thread end after what it does now, and wait for that; whether it has ended."""
        self.wake()
        self._outboxes.abandon(SupersededError("the stage is given up"))
        runner, self._runner = self._runner, None
        return runner is None or await asyncio.to_thread(runner.end, patience_s)
