"""Copies of a stage's trained state on their way to where they outlive this worker, while the stage computes on."""

from collections.abc import Mapping
from concurrent.futures import Future

from torch import Tensor

from coterie.cluster.fault_messages import REPLICA, Replicated
from coterie.cluster.messages import Assign, control
from coterie.errors import NetworkError
from coterie.ids import COORDINATOR, WorkerId
from coterie.logs import get_logger
from coterie.models.stage import StageModule
from coterie.pipeline.optimizer import ParameterState
from coterie.worker.outbox import Outbox
from coterie.worker.trained_copies import TrainedCopies
from coterie.worker.trained_state import CLONE_LIMIT_BYTES, UnitTensors, by_unit, copied, size_bytes, unit_frame

log = get_logger(__name__)

_CALM = 8
"""So many replicas that were out in time before they are tried twice as often again."""


class ReplicaSender:
    """`StateTaker` of one stage. All calls come from its compute thread; outboxes are its own, one for each receiver.

    Where the links are too slow for a replica at every due step, only those at multiples of twice, four times ... as
    many steps are sent. As all stages skip to multiples, their replicas still meet at the same steps.

    Args:
        stage: The stage.
        assign: As it was assigned.
        worker: This worker.
        outboxes: By receiver; that to the coordinator must be among them. Each is used for replicas alone. Others are
            sent what is copied at once: more would take twice as much of this device's uplink, and their memory.
        copies: Where this worker keeps its own.
        clone_limit_bytes: See `CLONE_LIMIT_BYTES`.
    """

    def __init__(
        self,
        stage: StageModule,
        assign: Assign,
        worker: WorkerId,
        outboxes: Mapping[WorkerId, Outbox],
        *,
        copies: TrainedCopies,
        clone_limit_bytes: int = CLONE_LIMIT_BYTES,
    ) -> None:
        self._stage = stage
        self._assign = assign
        self._worker = worker
        self._outboxes = dict(outboxes)
        self._copies = copies
        self._clone_limit_bytes = clone_limit_bytes
        self._pending: dict[WorkerId, Future[None]] = {}
        self._is_live = False
        self._stride = assign.replicate_every
        self._in_time = 0

    def before_update(self) -> None:
        """See `StateTaker`: live tensors must be out before they change.

        Raises:
            CoterieError: The coordinator's link broke, or the stage is given up.
        """
        if not self._is_live:
            return
        for receiver, outbox in tuple(self._outboxes.items()):
            try:
                outbox.wait_until_sent()
            except NetworkError as error:
                self._do_without(receiver, error)
        self._is_live = False

    def after_step(
        self, steps_done: int, parameters: Mapping[str, Tensor], state: Mapping[str, ParameterState]
    ) -> None:
        """See `StateTaker`: send a copy, unless the one before is still under way to the coordinator."""
        if steps_done % self._stride:
            return
        if self._is_late(COORDINATOR):
            self._stride, self._in_time = 2 * self._stride, 0
            log.info("replicas are not out in time: now only every %d steps", self._stride)
            return
        self._speed_up()
        units = by_unit(self._stage, parameters, state)
        self._is_live = size_bytes(units) > self._clone_limit_bytes
        if not self._is_live:
            units = copied(units)
        for receiver in tuple(self._outboxes):
            # The copies of whoever is late for one step are of use again with the next one.
            if receiver == COORDINATOR or not (self._is_live or self._is_late(receiver)):
                self._post(receiver, steps_done, units)
        self._copies.keep_own(steps_done, units, are_live=self._is_live)

    def _is_late(self, receiver: WorkerId) -> bool:
        return receiver in self._pending and not self._pending[receiver].done()

    def _speed_up(self) -> None:
        """Where links have become faster, or were slow but for a while."""
        self._in_time += 1
        if self._in_time > _CALM and self._stride > self._assign.replicate_every:
            self._stride, self._in_time = self._stride // 2, 0

    def _post(self, receiver: WorkerId, steps_done: int, units: UnitTensors) -> None:
        outbox = self._outboxes[receiver]
        try:
            for unit, tensors in units.items():
                place = (steps_done, unit)
                outbox.post(unit_frame(REPLICA, (self._worker, receiver), self._assign, place, tensors))
            if receiver == COORDINATOR:
                done = Replicated(step=steps_done)
                outbox.post(control(done, source=self._worker, plan_version=self._assign.plan.version))
            self._pending[receiver] = outbox.begin_drain()
        except NetworkError as error:
            self._do_without(receiver, error)

    def _do_without(self, receiver: WorkerId, error: NetworkError) -> None:
        if receiver == COORDINATOR:
            raise error
        log.info("no more replicas go to %s: %s", receiver, error.message)
        del self._outboxes[receiver]
