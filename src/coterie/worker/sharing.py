"""A device's compute backends, and how they share a run's layers: measured before it, dealt out anew during it."""

import time
from collections.abc import Callable

import msgspec

from coterie.backends.catalog import find_backends
from coterie.backends.shares import Need
from coterie.cluster.messages import ProfileRequest
from coterie.errors import BackendError
from coterie.heads.copies import shared_memory
from coterie.heads.install import SplitReport, install_split, remove_split
from coterie.heads.pool import BackendPool, Usage
from coterie.heads.shapes import BlockShapes, block_shapes
from coterie.logs import get_logger
from coterie.measure.backend_profile import ProfileSettings, profile_backends
from coterie.measure.share_work import Conditions
from coterie.measure.stand_in_weights import StandInWeights
from coterie.models import StageModule, build_stage, describe
from coterie.models.adapters import is_adapter
from coterie.planner.head_allocation import allocate
from coterie.planner.head_drift import LONGEST_WINDOW_JOBS, Dealt, Work, dealt_anew
from coterie.profiles.backend_profile import DeviceBackends
from coterie.profiles.cluster_profile import SharedMemory
from coterie.profiles.head_allocation import HeadAllocation, PartAllocation
from coterie.units import counted, format_seconds
from coterie.worker.settings import WorkerSettings

log = get_logger(__name__)

AUTO = ("auto",)
_TOLD_EVERY = 10
"""Every so many measurements the device's owner is told how far they are."""


class DeviceSharing:
    """The backends of a device, from when they are first needed until `close`, and what was measured of them.

    Args:
        settings: Which backends, with how many threads, and whether the shares are prescribed.
        say: Tells the device's owner something.

    Raises:
        BackendError: One that was named is absent.
    """

    def __init__(self, settings: WorkerSettings, say: Callable[[str], None]) -> None:
        found = find_backends(settings.threads, None if settings.backends == AUTO else settings.backends)
        self.pool = BackendPool(found.backends, lambda name, why: say(f"the backend {name} is left out: {why}"))
        self.notes: tuple[str, ...] = ()
        self._settings = settings
        self._say = say
        self._profiles: DeviceBackends | None = None
        self._allocation = settings.allocation or HeadAllocation()
        self._memory = SharedMemory()
        infos = self.pool.infos
        say(f"compute backends: {', '.join(f'{info.name} ({info.device})' for info in infos)}")

    @property
    def key(self) -> tuple[object, ...]:
        """Changes with what a measurement of shared layers depends on."""
        return (*self.pool.infos, self._allocation)

    @property
    def allocation(self) -> HeadAllocation:
        """Who is to compute what; empty if nothing is worth sharing."""
        return self._allocation

    @property
    def memory(self) -> SharedMemory:
        """What each block that is shared takes more."""
        return self._memory

    def measure(self, request: ProfileRequest) -> None:
        """Time shares of one of the model's blocks on every backend (or remember them), and deal them out."""
        stage, unit = _block_of(request)
        shapes = block_shapes(stage)
        self.notes = shapes.notes
        conditions = _conditions(request, shapes, stage, unit)
        if self._settings.allocation is None:
            self._allocation = self._dealt(request, shapes, conditions)
        self._memory = shared_memory(shapes, self._allocation, self.pool.infos, trains_weights=conditions.need.weights)
        hosted = self.pool.hosted & _names(self._allocation)
        if hosted:
            self.notes += (f"the memory of the process that {' and '.join(sorted(hosted))} runs in is not in the plan",)

    def _dealt(self, request: ProfileRequest, shapes: BlockShapes, conditions: Conditions) -> HeadAllocation:
        """What is worth sharing, by measurement."""
        if shapes.attention is None and shapes.neurons is None:
            return HeadAllocation()
        settings = ProfileSettings(
            again=self._settings.measure_again or request.again, progress=self._progress, clock=self._clock()
        )
        if settings.clock is time.process_time:
            settings = msgspec.structs.replace(settings, rounds_together=0)
        self._profiles = profile_backends(self.pool, shapes.attention, shapes.neurons, conditions, settings)
        self.pool.unload()  # what the trials took is memory that the plan does not know of
        allocation = _worth_it(allocate(self._profiles))
        self.notes += _in_words(self._profiles, allocation)
        return allocation

    def install(self, stage: StageModule) -> bool:
        """Share the blocks of a stage; whether anything in it is shared."""
        return bool(install_split(stage, self._allocation, self.pool).split_blocks)

    def cpu_s(self) -> float:
        """CPU seconds so far that the calling thread waited for backends."""
        return self.pool.lead_cpu_s

    def begin(self, stage: StageModule) -> "StageSharing":
        """Share the blocks of the stage that is going to run."""
        dealt = None
        if self._profiles is not None and self._settings.full_speed == 1:
            dealt = Dealt(profiles=self._profiles, allocation=self._allocation)
        return StageSharing(stage, self.pool, self._allocation, dealt, self._say)

    def close(self) -> None:
        """End all backends. Idempotent."""
        self.pool.close()

    def repeats_steps(self, *, on: bool) -> None:
        """Whether a stage in which a backend was found to compute wrongly ends, to do the step again without it."""
        self.pool.on_wrong = _end_stage if on else _go_on

    def _progress(self, what: str, number: int, of: int) -> None:
        if number % _TOLD_EVERY == 1:
            self._say(f"measuring backends, {number} of {of}: {what}")

    def _clock(self) -> Callable[[], float]:
        """An emulated device counts CPU seconds, as far as they are those of this process."""
        everyone_here = all(info.kind == "cpu" for info in self.pool.infos) and not self.pool.hosted
        return time.process_time if self._settings.full_speed < 1 and everyone_here else time.perf_counter


class StageSharing:
    """The backends of the stage that runs: what its executor is told of them, and when they are dealt out anew.

    Args:
        stage: The stage.
        pool: The backends.
        allocation: Who computes what.
        dealt: The same with the timings behind it, if shares may change in mid-run.
        say: Tells the device's owner something.
    """

    def __init__(
        self,
        stage: StageModule,
        pool: BackendPool,
        allocation: HeadAllocation,
        dealt: Dealt | None,
        say: Callable[[str], None],
    ) -> None:
        self._stage = stage
        self._pool = pool
        self._dealt = dealt
        self._say = say
        self._told: dict[str, float] = _busy(pool)
        self._known_bypassed: set[str] = set()
        self._gone: frozenset[str] = frozenset()
        self._window: dict[str, Usage] | None = None
        self._tell(install_split(stage, allocation, pool), allocation)
        self._names = _names(allocation)

    def cpu_s(self) -> float:
        """See `BackendUse`."""
        return self._pool.lead_cpu_s

    def since_last(self) -> tuple[dict[str, float], dict[str, str]]:
        """See `BackendUse`."""
        busy = _busy(self._pool)
        spent = {name: busy[name] - self._told[name] for name in busy if name in self._names}
        self._told = busy
        fresh = {name: why for name, why in self._pool.bypassed.items() if name not in self._known_bypassed}
        self._known_bypassed |= set(fresh)
        return spent, fresh

    def step_ended(self, *, is_idle: bool) -> None:
        """See `BackendUse`. The first step only warms up; what is in flight keeps its shares until its backward."""
        if self._dealt is None or not is_idle:
            return
        gone = frozenset(self._pool.bypassed)
        if self._window is None and gone == self._gone:
            self._window = _usage(self._pool)
            return
        work = self._work()
        anew = dealt_anew(self._dealt, work, gone)
        lost, self._gone = gone - self._gone, gone
        if anew is None:
            if all(work[name].jobs >= LONGEST_WINDOW_JOBS for name in _names(self._dealt.allocation)):
                self._window = _usage(self._pool)
        else:
            allocation = _worth_it(anew.allocation)  # what is not installed does no jobs either
            self._dealt, self._window = Dealt(profiles=anew.profiles, allocation=allocation), None
            self._names |= _names(allocation)
            why = f"without {' and '.join(sorted(lost))}" if lost else "backends take other times than were measured"
            self._say(f"heads and neurons are dealt out anew: {why}")
            self._tell(install_split(self._stage, allocation, self._pool), allocation)
            if allocation == HeadAllocation():
                self._say("torch computes alone from now on")

    def end(self) -> None:
        """Take the sharing back, and what the backends hold for it: the stage is given up."""
        remove_split(self._stage, self._pool)

    def _work(self) -> dict[str, Work]:
        """What backends did since shares were dealt out; those of a run that has just begun, nothing."""
        now, before = _usage(self._pool), self._window or _usage(self._pool)
        return {
            name: Work(jobs=now[name].jobs - before[name].jobs, busy_s=now[name].busy_s - before[name].busy_s)
            for name in now
        }

    def _tell(self, report: SplitReport, allocation: HeadAllocation) -> None:
        for part, blocks in (("heads", report.attention), ("neurons", report.neurons)):
            shares = allocation.attention if part == "heads" else allocation.neurons
            if blocks and shares is not None:
                self._say(f"{part} of {counted(len(blocks), 'block')} are shared: {shares_in_words(shares)}")
        for what, why in report.unsplit.items():
            self._say(f"{what} is not shared: {why}")


def _end_stage(name: str, reason: str) -> None:
    raise BackendError(
        f"the backend {name} is left out: {reason}; training goes on from before the step in which that was found",
        hint="leave it out with --backends, or look for another driver",
    )


def _go_on(_name: str, _reason: str) -> None:
    pass


def shares_in_words(part: PartAllocation) -> str:
    """Who computes how many."""
    return ", ".join(
        f"{share.backend} {share.count:,}{' one by one' if share.strategy == 'each' else ''}" for share in part.shares
    )


def _block_of(request: ProfileRequest) -> tuple[StageModule, int]:
    """A block from the middle of the model, with random weights, as a stage of its own, and its unit."""
    unit = (describe(request.spec).unit_count - 1) // 2 or 1
    stage = build_stage(request.spec, unit, unit + 1, StandInWeights(request.spec))
    stage.train()
    return stage, unit


def _conditions(request: ProfileRequest, shapes: BlockShapes, stage: StageModule, unit: int) -> Conditions:
    """What the run will ask of the block's shares."""
    trained = stage.trainable()
    return Conditions(
        rows=request.rows[1],
        tokens=request.model.typical_tokens,
        need=Need(
            x=unit > describe(request.spec).first_backward_unit,
            weights=any(not is_adapter(name) for name in trained),
            added=any(is_adapter(name) for name in trained),
        ),
        causal=shapes.causal,
        dropout=shapes.dropout,
    )


def _worth_it(allocation: HeadAllocation) -> HeadAllocation:
    """Without parts that torch on the processor computes alone: those are better left as they are."""
    parts = {"attention": allocation.attention, "neurons": allocation.neurons}
    kept = {name: part for name, part in parts.items() if part is not None and _backends(part) != {"torch"}}
    return HeadAllocation(**kept)


def _in_words(profiles: DeviceBackends, allocation: HeadAllocation) -> tuple[str, ...]:
    """The allocation for people: who gets what, what it gains, who is left out and why."""
    lines = []
    everything = _all_parts(allocate(profiles))
    for name, part in everything.items():
        faster = part.best_single_s / part.predicted_s if part.predicted_s else 1.0  # a coarse clock may stand still
        what = "heads" if name == "attention" else "neurons"
        groups = f" (of {counted(profiles.groups, 'KV group')})" if name == "attention" else ""
        lines.append(
            f"{what}: {shares_in_words(part)}{groups}, {format_seconds(part.predicted_s)} a block; {part.best_single} "
            f"alone {format_seconds(part.best_single_s)}: {faster:.2f} times as fast"
        )
        lines += [f"{what} without {backend}: {why}" for backend, why in part.left_out.items()]
    if not _all_parts(allocation):
        lines.append("torch alone is fastest: nothing is shared")
    return tuple(lines)


def _all_parts(allocation: HeadAllocation) -> dict[str, PartAllocation]:
    parts = {"attention": allocation.attention, "neurons": allocation.neurons}
    return {name: part for name, part in parts.items() if part is not None}


def _names(allocation: HeadAllocation) -> set[str]:
    return {name for part in _all_parts(allocation).values() for name in _backends(part)}


def _backends(part: PartAllocation) -> set[str]:
    return {share.backend for share in part.shares}


def _busy(pool: BackendPool) -> dict[str, float]:
    return {name: usage.busy_s for name, usage in pool.usage.items()}


def _usage(pool: BackendPool) -> dict[str, Usage]:
    return {name: msgspec.structs.replace(usage) for name, usage in pool.usage.items()}
