"""What backends take side by side: the groups that the scheduler would choose from are tried, and dealt out again."""

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence

from coterie.backends.backend import Backend
from coterie.backends.shares import AttentionShape, Shape
from coterie.errors import BackendError
from coterie.heads.dealing import computed_as, part_shape
from coterie.heads.pool import BackendPool
from coterie.measure.share_work import Conditions, ShareWork
from coterie.planner.head_allocation import allocate_among, groups_of
from coterie.profiles.backend_profile import DeviceBackends, Part, Together
from coterie.profiles.head_allocation import PartAllocation, PartShare

_MOST_GROUPS = 3
_PASSES = 2
"""The first corrects the seconds; the second measures the shares that are dealt out by the corrected ones."""

_WARM_UP = 1


class TogetherBench:
    """Tries the groups of backends that share a part fastest by their times alone.

    Processors' backends take each other's cache and memory bandwidth, and not equally; timings of a noisy moment are
    corrected too. Otherwise all would wait for the one whose seconds alone promised too much.

    Args:
        pool: The backends.
        conditions: Of the run.
        rounds: Forwards and backwards of each try, or fewer where they take long; their median counts.
        budget_s: Seconds for each part, by what is predicted; the first group is tried in any case.
        clock: Seconds, as each backend's own thread sees them.
        say: Told which group is tried.

    Attributes:
        failed: Backends that raised an error, with its message.
    """

    def __init__(
        self,
        pool: BackendPool,
        conditions: Conditions,
        *,
        rounds: int,
        budget_s: float,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._conditions = conditions
        self._rounds = rounds
        self._budget_s = budget_s
        self._clock = clock
        self._say = say
        self.failed: dict[str, str] = {}

    def time_part(self, shape: Shape, profile: DeviceBackends) -> tuple[Together, ...]:
        """How many times as long as alone backends take when they share a part.

        Args:
            shape: The whole part.
            profile: Their times alone.

        Raises:
            BackendError: One failed.
        """
        part: Part = "attention" if isinstance(shape, AttentionShape) else "neurons"
        alone = {group: allocate_among(profile, part, group, {}) for group in groups_of(profile, part)}
        found: list[Together] = []
        spent_s = 0.0
        for group in sorted(alone, key=lambda group: alone[group].predicted_s)[:_MOST_GROUPS]:
            if found and spent_s >= self._budget_s:
                break
            slowed: dict[str, float] = {}
            for _ in range(_PASSES):
                dealt = allocate_among(profile, part, group, slowed)
                if len(dealt.shares) < 2:
                    break
                self._say(f"{' and '.join(share.backend for share in dealt.shares)} side by side, {part}")
                rounds = self._rounds_of(dealt.predicted_s)
                spent_s += (rounds + _WARM_UP) * dealt.predicted_s
                slowed |= _growth(dealt, self._side_by_side(shape, dealt, rounds), slowed)
            found.append(Together(part=part, backends=group, slowed=slowed))
        return tuple(found)

    def _rounds_of(self, seconds: float) -> int:
        """So many that all groups fit into the budget, but at least one."""
        each_s = self._budget_s / (_MOST_GROUPS * _PASSES)
        return self._rounds if seconds <= 0 else max(1, min(self._rounds, int(each_s / seconds) - _WARM_UP))

    def _side_by_side(self, shape: Shape, dealt: PartAllocation, rounds: int) -> dict[str, float]:
        """Median seconds of each share; all begin each round together, as in a run."""
        start = threading.Barrier(len(dealt.shares))
        works = {share.backend: ShareWork(_shapes(shape, share), self._conditions) for share in dealt.shares}
        measured = self._pool.call_together(
            {name: self._timed(name, work, start, rounds) for name, work in works.items()}
        )
        return {name: statistics.median(samples) for name, samples in measured.items()}

    def _timed(
        self, name: str, work: ShareWork, start: threading.Barrier, rounds: int
    ) -> Callable[[Backend], list[float]]:
        def measure(backend: Backend) -> list[float]:
            samples = []
            try:
                for _ in range(_WARM_UP + rounds):
                    start.wait()
                    begin_s = self._clock()
                    work.once(backend)
                    samples.append(self._clock() - begin_s)
            except threading.BrokenBarrierError:
                return []  # another's error tells what happened
            except BaseException as error:
                start.abort()  # whatever it is, the others must not wait for this one
                if isinstance(error, BackendError):
                    self.failed[name] = error.message
                raise
            finally:
                work.release()
            return samples[_WARM_UP:]

        return measure


def _growth(dealt: PartAllocation, seconds: Mapping[str, float], slowed: Mapping[str, float]) -> dict[str, float]:
    """Seconds side by side over those alone; what was predicted has what was known of that in it.

    Less than 1 says that the machine was busier before: what was measured last, with all of them at work, is believed.
    Nothing of those for which a coarse clock did not move.
    """
    return {
        share.backend: slowed.get(share.backend, 1.0) * seconds[share.backend] / share.predicted_s
        for share in dealt.shares
        if share.predicted_s > 0 and seconds[share.backend] > 0
    }


def _shapes(whole: Shape, share: PartShare) -> Sequence[Shape]:
    return computed_as(part_shape(whole, share.count), share.strategy)
