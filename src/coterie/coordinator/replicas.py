"""The trained state in the coordinator's memory: what arrives of each step, and the last step that is whole."""

import sys
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from coterie.checkpoint.shard_file import Shapes, check_tensors, found_in, split_state
from coterie.checkpoint.trained_state import UnitState
from coterie.errors import CheckpointError
from coterie.logs import get_logger
from coterie.tensors.codecs import decode
from coterie.transport.frame import Frame

log = get_logger(__name__)

MOST_STEPS = 8
"""Steps that may be under way at once; stages are a few apart, as many as are fed ahead."""


class Replica:
    """All trained units after `step` optimizer steps; a `TrainedState`. Tensors are read from the frames that came."""

    def __init__(self, step: int, units: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._step = step
        self._units = {unit: split_state(tensors) for unit, tensors in units.items()}
        self._unit_of = {name: unit for unit, (parameters, _) in self._units.items() for name in parameters}

    @property
    def step(self) -> int:
        """See `TrainedState`."""
        return self._step

    @property
    def unit_of(self) -> Mapping[str, int]:
        """See `TrainedState`."""
        return self._unit_of

    @property
    def units(self) -> Mapping[int, UnitState]:
        """Parameters and optimizer state of each unit."""
        return self._units

    def read(self, names: Collection[str]) -> UnitState:
        """See `TrainedState`."""
        parameters: dict[str, Tensor] = {}
        state: dict[str, dict[str, Tensor]] = {}
        for name in names:
            if name not in self._unit_of:
                raise CheckpointError(f"the replica of step {self._step} holds no {name}")
            of_unit, fields = self._units[self._unit_of[name]]
            parameters[name] = of_unit[name]
            if name in fields:
                state[name] = fields[name]
        return parameters, state


class ReplicaStore:
    """Replicas as workers send them, unit by unit, in any order of units; steps of each unit come in order.

    A step is committed when all trained units of it are here, whatever cut they come from, and all that is reported of
    it; older ones are dropped then.

    Args:
        shapes: Of each trained unit's parameters.
        on_commit: Told of each replica that has become whole.
        steps_done: Steps of which all reports are here. Trained tensors may come before the last of them: were such a
            step committed and a worker then lost, nobody would ever know its loss. By default nobody waits for that.
    """

    def __init__(
        self,
        shapes: Mapping[int, Shapes],
        on_commit: Callable[[Replica], None] = lambda _replica: None,
        *,
        steps_done: int = sys.maxsize,
    ) -> None:
        self._shapes = shapes
        self._on_commit = on_commit
        self._steps_done = steps_done
        self._arrived: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.committed: Replica | None = None

    @property
    def step(self) -> int:
        """Of the last commit; -1 before the first."""
        return -1 if self.committed is None else self.committed.step

    def put(self, step: int, unit: int, frame: Frame) -> None:
        """Take one unit's trained tensors after `step` steps; those of a step before the committed one are dropped.

        Raises:
            ProtocolError: They are not the tensors of that unit.
        """
        if step <= self.step:
            log.info("a replica of unit %d after %d steps came late", unit, step)
            return
        named = zip(frame.header.tensors, frame.buffers, strict=True)
        tensors = {spec.name: decode(spec, buffer) for spec, buffer in named}
        # A unit without trained parameters has nothing to send: `check_tensors` finds its tensors unknown.
        check_tensors(unit, found_in(tensors), self._shapes.get(unit, {}))
        units = self._arrived.setdefault(step, {})
        units[unit] = tensors
        if len(self._arrived) > MOST_STEPS:
            del self._arrived[min(self._arrived)]
        self._commit_whole()

    def done(self, steps: int) -> None:
        """All reports of so many steps are here, or (after a loss) again of fewer."""
        self._steps_done = steps
        self._commit_whole()

    def restart(self) -> None:
        """Drop what has arrived and is not whole: a new plan replays those steps, and sends them again."""
        self._arrived.clear()

    def _commit_whole(self) -> None:
        whole = [step for step, units in self._arrived.items() if units.keys() >= self._shapes.keys()]
        step = max((step for step in whole if step <= self._steps_done), default=-1)
        if step < 0:
            return
        replica = self.committed = Replica(step, self._arrived[step])
        self._arrived = {step: units for step, units in self._arrived.items() if step > replica.step}
        self._on_commit(replica)
