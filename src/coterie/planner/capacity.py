"""How fast devices really are in a run: FTPipeHD's capacities, measured seconds over predicted ones (METHODS 1.1).

`C_i` of FTPipeHD compares a device with a reference device; here the reference is the device itself as it was profiled,
and a factor of 3 says that it takes three times the seconds. First looked at after 10 steps, then whenever a factor has
moved away from where it was when the plan was last judged.
"""

import statistics
from collections.abc import Mapping

import msgspec

from coterie.ids import WorkerId
from coterie.planner.plan import Plan
from coterie.profiles.cluster_profile import ClusterProfile, at_speed

FIRST_STEPS = 10
"""Steps of a plan before its devices are judged for the first time."""

WINDOW_STEPS = 7
"""A factor is the median over this many steps: three steps out of line change nothing, four of another speed do."""

NEGLIGIBLE = 0.1
"""Of the slowest stage's predicted seconds: a stage that takes less says nothing of how fast its device is, since what
each micro-batch costs beside its layers outweighs them (an embedding alone), and nobody waits for it."""

DRIFT = 0.2
"""How far a factor must have moved from where it was when it was last judged."""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reported of one step: forward and backward seconds of a micro-batch, throttling included."""

    worker: WorkerId
    seconds: float


class WorkerPace(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's running times.

    Attributes:
        worker: Who.
        samples: Measured over predicted of the last steps, oldest first, against the device as it was profiled.
        factor: Their median once there are `WINDOW_STEPS`; before that, and while it has no stage, the last one known.
        judged: The factor when the plan was last judged; 1 before that.
        planned: The factor that the figures of the plan in force were made with.
    """

    worker: WorkerId
    samples: tuple[float, ...] = ()
    factor: float = 1.0
    judged: float = 1.0
    planned: float = 1.0


class Capacities(msgspec.Struct, frozen=True, kw_only=True):
    """Running times of all workers that have had a stage. An empty one says that all are as they were profiled.

    The order of calls: `observe` after each step; if `drifted`, plan with `rescaled` and call `judged`, whatever comes
    of it; call `adopted` whenever a plan takes effect that was made with `rescaled`.
    """

    paces: tuple[WorkerPace, ...] = ()

    @property
    def factors(self) -> tuple[tuple[WorkerId, float], ...]:
        """Measured over predicted seconds; 1.0 is as profiled."""
        return tuple((pace.worker, pace.factor) for pace in self.paces)

    def factor(self, worker: WorkerId) -> float:
        """One worker's factor; 1.0 if nothing is known."""
        return dict(self.factors).get(worker, 1.0)


def observe(capacities: Capacities, plan: Plan, times: tuple[StageTimes, ...], *, load: float = 1.0) -> Capacities:
    """Note one step of `plan`.

    Args:
        capacities: What is known so far.
        plan: The plan in force.
        times: Of its stages; those of others are left aside.
        load: How much longer the step's rows were than those that the plan counts with, in tokens: 1 for equal ones.
    """
    predicted_s = {stage.worker: stage.forward_s + stage.backward_s for stage in plan.stages}
    least_s = NEGLIGIBLE * load * max(predicted_s.values())
    paces = {pace.worker: pace for pace in capacities.paces}
    for time in times:
        expected_s = predicted_s.get(time.worker, 0.0) * load
        if expected_s > 0 and max(expected_s, time.seconds) >= least_s:
            pace = paces.get(time.worker, WorkerPace(worker=time.worker))
            paces[time.worker] = _with_sample(pace, time.seconds / expected_s * pace.planned)
    return Capacities(paces=tuple(paces.values()))


def _with_sample(pace: WorkerPace, sample: float) -> WorkerPace:
    samples = (*pace.samples, sample)[-WINDOW_STEPS:]
    factor = statistics.median(samples) if len(samples) == WINDOW_STEPS else pace.factor
    return msgspec.structs.replace(pace, samples=samples, factor=factor)


def drifted(capacities: Capacities, plan: Plan, *, steps_since_plan: int) -> bool:
    """Is there reason to plan anew: has a device of the plan become faster or slower by more than `DRIFT`?

    Measured against the factor when the plan was last judged, so that a device that hovers around a threshold is judged
    once.
    """
    if steps_since_plan < FIRST_STEPS:
        return False
    used = {stage.worker for stage in plan.stages}
    return any(
        pace.worker in used and len(pace.samples) == WINDOW_STEPS and _moved(pace.factor, pace.judged)
        for pace in capacities.paces
    )


def _moved(factor: float, judged: float) -> bool:
    return factor > judged * (1 + DRIFT) or factor * (1 + DRIFT) < judged


def judged(capacities: Capacities) -> Capacities:
    """The plan has been judged with these factors: the next judgement needs a drift from here, and new samples."""
    return Capacities(
        paces=tuple(msgspec.structs.replace(pace, samples=(), judged=pace.factor) for pace in capacities.paces)
    )


def adopted(capacities: Capacities, planned_with: Capacities) -> Capacities:
    """A plan takes effect whose figures were made by `rescaled(..., planned_with)`: samples begin anew."""
    factors: Mapping[WorkerId, float] = dict(planned_with.factors)
    known = {pace.worker: pace for pace in capacities.paces}
    return Capacities(
        paces=tuple(
            msgspec.structs.replace(pace, samples=(), judged=factors.get(worker, 1.0), planned=factors.get(worker, 1.0))
            for worker, pace in known.items()
        )
    )


def forgotten(capacities: Capacities, worker: WorkerId) -> Capacities:
    """The worker has been profiled anew, or is gone: what its times said before means nothing any more."""
    return Capacities(paces=tuple(pace for pace in capacities.paces if pace.worker != worker))


def rescaled(cluster: ClusterProfile, capacities: Capacities) -> ClusterProfile:
    """The cluster at the speeds measured since; `cluster` is always the one as profiled, never a result of this."""
    devices = tuple(at_speed(device, 1 / capacities.factor(device.worker)) for device in cluster.devices)
    return msgspec.structs.replace(cluster, devices=devices)
