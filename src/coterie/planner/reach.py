"""Does anything fit, and with how little? Memory alone: a yes-or-no programme over device subsets."""

from collections.abc import Callable

import numpy as np

from coterie.planner.search import most_stages
from coterie.planner.subsets import Growth
from coterie.planner.tables import DepthMode, Ints, Tables


class MemoryReach:
    """Which subsets of the devices can hold the whole model, for given bytes above base on each."""

    def __init__(self, tables: Tables, mode: DepthMode) -> None:
        request = tables.problem.request
        self.units = tables.problem.units
        self.most = most_stages(tables.problem)
        self.least = request.min_stages if request.fixed_stages is None else len(request.fixed_stages)
        self._growth = Growth(tables.problem, self.most)
        self._needed = [tables.least_bytes(place, mode) for place in range(1, self.most + 1)]
        self._count = len(tables.problem.devices)

    def fits(self, capacity: Ints) -> bool:
        """Is there any pipeline whose stages stay within `capacity`?"""
        return self.fewest_stages(capacity) is not None

    def fewest_stages(self, capacity: Ints) -> int | None:
        """Fewest stages with which everything fits; None if nothing does."""
        holds = [(needed <= capacity[:, None, None]).astype(np.float32) for needed in self._needed]
        # reached[set, u]: the set can hold units [u, N).
        reached = np.zeros((1 << self._count, self.units + 1), dtype=np.bool_)
        for device in self._growth.first:
            reached[1 << device] = holds[0][device, :, self.units] > 0
        done = [1 << device for device in self._growth.first]
        for stages in range(1, self.most + 1):
            if stages >= self.least and reached[done, 0].any():
                return stages
            if stages == self.most:
                break
            grown: set[int] = set()
            for device, hosts in self._growth.steps[stages - 1]:
                reached[hosts | 1 << device] |= reached[hosts].astype(np.float32) @ holds[stages][device].T > 0
                grown.update((hosts | 1 << device).tolist())
            done = sorted(grown)
        return None

    def least_peak(self, limits: Ints) -> int | None:
        """The smallest number of bytes above base that no device need exceed, within the devices' own limits."""
        return self._least(lambda level: np.minimum(limits, level), self._all_needed())

    def least_addition(self, limits: Ints) -> int | None:
        """The smallest number of bytes that, added to every device, would make something fit."""
        short = np.concatenate([(needed - limits[:, None, None])[needed < _huge()].ravel() for needed in self._needed])
        return self._least(lambda level: limits + level, np.unique(short))

    def _all_needed(self) -> Ints:
        return np.unique(np.concatenate([needed[needed < _huge()].ravel() for needed in self._needed]))

    def _least(self, capacity_at: Callable[[int], Ints], levels: Ints) -> int | None:
        low, high = 0, len(levels) - 1
        if high < 0 or not self.fits(capacity_at(int(levels[high]))):
            return None
        while low < high:
            middle = (low + high) // 2
            if self.fits(capacity_at(int(levels[middle]))):
                high = middle
            else:
                low = middle + 1
        return int(levels[high])


def _huge() -> int:
    return int(np.iinfo(np.int64).max)
