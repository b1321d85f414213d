"""All stages of a problem at once, as arrays [device, first unit, stop unit]: seconds, bytes, deepest depth."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.planner.memory import all_stage_sizes, stage_bytes
from coterie.planner.plan import Allocator
from coterie.planner.problem import TIGHT_ALLOCATOR_SLOWDOWN, Floats, Problem

Ints = NDArray[np.int64]

DepthMode = Literal["textbook", "deeper", "shallower"]
"""How many micro-batches a stage may hold: `S - s`; that or more where memory allows; any number from 1."""

MAX_DEPTH = 64
"""No stage goes deeper, unless a step has more micro-batches."""


class Option(NamedTuple):
    """One way to run a stage."""

    recompute: bool
    allocator: Allocator


OPTIONS = (
    Option(recompute=False, allocator="default"),
    Option(recompute=False, allocator="tight"),
    Option(recompute=True, allocator="default"),
    Option(recompute=True, allocator="tight"),
)
"""In order of preference; of equally fast ones the first is taken."""


class Tables:
    """Seconds and bytes of every possible stage, per option.

    Attributes:
        compute_s: Per option, [W, N+1, N+1]: seconds of a micro-batch, infinite where the option is not allowed.
        fixed_bytes, depth_bytes: Per option, same shape: memory above base at depth 0, and what each depth adds.
        unit_s: [W, N]: least seconds of each unit, whichever stages may be used.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.max_depth = max(MAX_DEPTH, problem.micro_batches)
        sizes = all_stage_sizes(problem.model, problem.rows)
        shape = (len(problem.devices), problem.units + 1, problem.units + 1)
        used = _used_stages(problem, shape)
        blocks = np.zeros(problem.units)
        blocks[max(1, problem.first_backward_unit) : -1] = 1.0
        plain = _range_sums(problem.forward_s + problem.backward_s)
        again = plain + _range_sums(problem.forward_s * blocks)
        update = _range_sums(problem.update_s)
        self.compute_s: list[Floats] = []
        self.fixed_bytes: list[Ints] = []
        self.depth_bytes: list[Ints] = []
        units: list[Floats] = []
        for option in OPTIONS:
            slower = TIGHT_ALLOCATOR_SLOWDOWN if option.allocator == "tight" else 1.0
            seconds = (again if option.recompute else plain) * slower + update
            fixed, per_depth = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
            for device in range(shape[0]):
                settings = problem.settings(device, recompute=option.recompute, allocator=option.allocator)
                parts = stage_bytes(sizes, settings)
                fixed[device], per_depth[device] = parts.fixed, parts.per_depth
            permitted = self._is_allowed(option)
            self.compute_s.append(np.where(used & permitted[:, None, None], seconds, np.inf))
            units.append(np.where(permitted[:, None], _whole_units(seconds), np.inf))
            self.fixed_bytes.append(fixed)
            self.depth_bytes.append(per_depth)
        self.unit_s: Floats = np.minimum.reduce(units)

    def _is_allowed(self, option: Option) -> NDArray[np.bool_]:
        problem = self.problem
        allowed = option.recompute in problem.recompute_choices()
        devices = range(len(problem.devices))
        return np.array([allowed and option.allocator in problem.allocators(device) for device in devices])

    def required_depth(self, place: int, mode: DepthMode) -> int:
        """Micro-batches that the stage `place` stages from the end (the last: 1) must be able to hold."""
        if self.problem.kind == "gpipe":
            return self.problem.micro_batches
        if mode == "shallower" or self.problem.kind == "forward":
            return 1
        return self.problem.in_flight(place)

    def least_bytes(self, place: int, mode: DepthMode) -> Ints:
        """[W, N+1, N+1]: memory above base at the required depth, with the option that needs least."""
        depth = self.required_depth(place, mode)
        huge = np.iinfo(np.int64).max
        totals = [
            np.where(np.isfinite(seconds), fixed + depth * per_depth, huge)
            for seconds, fixed, per_depth in zip(self.compute_s, self.fixed_bytes, self.depth_bytes, strict=True)
        ]
        return np.asarray(np.minimum.reduce(totals), dtype=np.int64)

    def deepest(self, option: int, limits: Ints) -> Ints:
        """[W, N+1, N+1]: how many micro-batches fit under `limits` (bytes above base per device); 0 if none."""
        room = limits[:, None, None] - self.fixed_bytes[option]
        each = self.depth_bytes[option]
        depth = np.where(each > 0, room // np.maximum(each, 1), np.where(room >= 0, self.max_depth, 0))
        return np.clip(depth, 0, self.max_depth)


def memory_limits(problem: Problem) -> Ints:
    """Bytes above base that each device may use."""
    return np.array([device.memory_bytes - device.base_bytes for device in problem.devices], dtype=np.int64)


def _range_sums(per_unit: Floats) -> Floats:
    total = np.concatenate([np.zeros((len(per_unit), 1)), np.cumsum(per_unit, axis=1)], axis=1)
    return np.asarray(total[:, None, :] - total[:, :, None], dtype=np.float64)


def _whole_units(seconds: Floats) -> Floats:
    """[W, N]: seconds of stages of one unit."""
    units = np.arange(seconds.shape[1] - 1)
    return seconds[:, units, units + 1]


def _used_stages(problem: Problem, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    """Which stages may be used at all: first < stop, or only the prescribed ones; the ends only where the data is."""
    fixed = problem.request.fixed_stages
    if fixed is None:
        first, stop = np.indices(shape[1:])
        owners = set(problem.request.owner_workers)
        may_end = np.array([not owners or device.worker in owners for device in problem.devices])
        is_inner = (first > 0) & (stop < problem.units)
        return np.asarray((first < stop) & (may_end[:, None, None] | is_inner), dtype=np.bool_)
    used = np.zeros(shape, dtype=np.bool_)
    index = {device.worker: number for number, device in enumerate(problem.devices)}
    for stage in fixed:
        used[index[stage.worker], stage.first_unit, stage.stop_unit] = True
    return used
