"""Device subsets, grown one device at a time from the last stage towards the first; identical devices in one order.

So are devices whose order is prescribed.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.planner.problem import Problem


class Growth:
    """Which subsets (as bit masks) may get which device next.

    Attributes:
        steps: Per number of devices placed (from 1): pairs of a device and the subsets that it may be added to.
    """

    def __init__(self, problem: Problem, most: int) -> None:
        count = len(problem.devices)
        twins = [_twins_before(problem, device) for device in range(count)]
        earlier = [_earlier(problem, device) for device in range(count)]
        self.first = [device for device in range(count) if not twins[device]]
        reached = {1 << device for device in self.first}
        self.steps: list[list[tuple[int, NDArray[np.int64]]]] = []
        for _ in range(1, most):
            step = []
            grown: set[int] = set()
            for device in range(count):
                bit = 1 << device
                hosts = sorted(
                    s for s in reached if not s & (bit | earlier[device]) and s & twins[device] == twins[device]
                )
                if hosts:
                    step.append((device, np.array(hosts, dtype=np.int64)))
                    grown.update(subset | bit for subset in hosts)
            self.steps.append(step)
            reached = grown


def _twins_before(problem: Problem, device: int) -> int:
    """Mask of the devices with a lower index that cannot be told from `device`."""
    return sum(1 << other for other in range(device) if _are_twins(problem, other, device))


def _earlier(problem: Problem, device: int) -> int:
    """Mask of the devices that, where an order is prescribed, come before `device`."""
    order = problem.request.in_order
    worker = problem.devices[device].worker
    before = set(order[: order.index(worker)]) if worker in order else set()
    return sum(1 << other for other, profile in enumerate(problem.devices) if profile.worker in before)


def _are_twins(problem: Problem, first: int, second: int) -> bool:
    request = problem.request
    workers = [problem.devices[device].worker for device in (first, second)]
    owned = {worker in request.owner_workers for worker in workers}
    if request.fixed_stages is not None or len(owned) > 1 or any(worker in request.in_order for worker in workers):
        return False
    plain = [
        msgspec.structs.replace(problem.devices[device], worker=problem.devices[0].worker, name="")
        for device in (first, second)
    ]
    if plain[0] != plain[1]:
        return False
    swap = np.arange(len(problem.devices))
    swap[[first, second]] = swap[[second, first]]
    return all(
        np.array_equal(matrix, matrix[np.ix_(swap, swap)], equal_nan=True)
        for matrix in (_without_diagonal(problem.bytes_per_s), _without_diagonal(problem.latency_s))
    )


def _without_diagonal(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    copy = matrix.copy()
    np.fill_diagonal(copy, 0.0)
    return copy
