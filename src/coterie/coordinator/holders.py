"""Which tensors each worker has from the plans before, as far as can be told, and which copies it keeps from now on."""

from collections.abc import Collection, Mapping

import msgspec

from coterie.cluster.fault_messages import CopyTerms
from coterie.coordinator.replication import SMALL_BYTES, copy_peers
from coterie.ids import WorkerId
from coterie.planner.plan import Plan
from coterie.planner.rebalance import UnitBytes
from coterie.units import MIB

COPIED_STEPS = 5
"""The committed step, and those that a stage may be ahead of it: two are fed ahead, and replicas take their time."""

COPY_ROOM_BYTES = MIB
"""For what no profile counts, such as the step that every moment has beside it."""

Units = Mapping[WorkerId, frozenset[int]]
"""Some of the units that a worker has, by worker."""


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What the stages of a plan take over from the plan before, and what they do for the next one.

    Attributes:
        frozen: Units whose frozen tensors a worker has.
        trained: Units whose trained state it may have: it is asked.
        terms: What it does with copies.
        replicate_every: Steps between the replicas that stages send; 0: none.
    """

    frozen: Units = {}
    trained: Units = {}
    terms: Mapping[WorkerId, CopyTerms] = {}
    replicate_every: int = 0


class HandedOut(msgspec.Struct, frozen=True, kw_only=True):
    """What went to a stage, and what need not.

    Attributes:
        sent_bytes: Of tensors.
        trained: Units of which the worker had the trained state.
    """

    sent_bytes: int = 0
    trained: frozenset[int] = frozenset()


class Holders:
    """Lives as long as the run.

    Args:
        units: What each unit weighs.
    """

    def __init__(self, units: tuple[UnitBytes, ...]) -> None:
        self._units = units
        self._frozen: dict[WorkerId, frozenset[int]] = {}
        self._trained: dict[WorkerId, frozenset[int]] = {}

    def forget(self, worker: WorkerId) -> None:
        """It is gone, with all that it had."""
        self._frozen.pop(worker, None)
        self._trained.pop(worker, None)

    def hand_over(
        self,
        plan: Plan,
        every: int,
        *,
        owners: Collection[WorkerId],
        rates: Mapping[tuple[WorkerId, WorkerId], float],
    ) -> Handover:
        """For a plan that takes effect, with replicas every so many steps; `owners`, `rates`: see `copy_peers`."""
        stages = units_of(plan)
        # Whoever is assigned a stage keeps what the stage has in common with the last one, and no more.
        frozen = {worker: self._frozen.get(worker, frozenset()) & units for worker, units in stages.items()}
        self._frozen |= frozen
        return Handover(
            frozen=frozen,
            trained={worker: self._trained.get(worker, frozenset()) & units for worker, units in stages.items()},
            terms=self._terms(plan, copy_peers(plan, self._units, every, owners=owners, rates=rates)) if every else {},
            replicate_every=every,
        )

    def _terms(self, plan: Plan, peers: Mapping[WorkerId, WorkerId]) -> dict[WorkerId, CopyTerms]:
        terms = {}
        for worker in units_of(plan):
            sources = tuple(source for source, peer in peers.items() if peer == worker)
            most_bytes = max(self._trained_bytes(plan, {worker}), self._trained_bytes(plan, sources))
            terms[worker] = CopyTerms(
                peer=peers.get(worker, WorkerId("")),
                sources=sources,
                limit_bytes=COPIED_STEPS * most_bytes + COPY_ROOM_BYTES,
            )
        return terms

    def _trained_bytes(self, plan: Plan, workers: Collection[WorkerId]) -> int:
        units = units_of(plan)
        return sum(self._units[unit].trained_bytes for worker in workers for unit in units[worker])

    def stands(self, plan: Plan, handover: Handover, *, with_disks: Collection[WorkerId]) -> None:
        """The plan has taken effect; a worker keeps much on its disk, or not at all if it keeps nothing there."""
        units = units_of(plan)
        self._frozen |= units
        self._trained = {}
        for worker, terms in handover.terms.items():
            kept = (origin for origin in ((worker,), terms.sources) if self._is_kept(plan, worker, origin, with_disks))
            self._trained[worker] = frozenset(unit for origin in kept for source in origin for unit in units[source])

    def _is_kept(
        self, plan: Plan, worker: WorkerId, origin: Collection[WorkerId], with_disks: Collection[WorkerId]
    ) -> bool:
        return worker in with_disks or self._trained_bytes(plan, origin) <= SMALL_BYTES

    def kept_bytes(self, handover: Handover, handed_out: Mapping[WorkerId, HandedOut]) -> int:
        """What stages found where they are when a plan took effect."""
        frozen = sum(self._units[unit].frozen_bytes for units in handover.frozen.values() for unit in units)
        trained = sum(self._units[unit].trained_bytes for one in handed_out.values() for unit in one.trained)
        return frozen + trained


def units_of(plan: Plan) -> dict[WorkerId, frozenset[int]]:
    """Each worker's units in a plan."""
    return {stage.worker: frozenset(range(stage.first_unit, stage.stop_unit)) for stage in plan.stages}
