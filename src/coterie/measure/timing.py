"""Seconds of a piece of work, as the run will feel them: medians, warm, throttled devices by their busy time."""

import statistics
import time
from collections.abc import Callable

import torch

_LEAST_SAMPLES = 3
_MOST_SAMPLES = 15


class Stopwatch:
    """Times work on one device.

    A throttled device (`pipeline.throttle`) sleeps until wall time is the compute thread's CPU time over its speed; so
    that is what is measured there, without sleeping, and what others do on the machine meanwhile does not count. Of an
    accelerator it is the time until that has finished.
    """

    def __init__(
        self,
        *,
        device_type: str = "cpu",
        throttle_speed: float | None = None,
        elsewhere_cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`elsewhere_cpu_s`: CPU seconds so far, in other threads, that this one waited for (compute backends)."""
        self._device_type = device_type
        self._throttle_speed = throttle_speed
        self._elsewhere_cpu_s = elsewhere_cpu_s

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one call."""
        wall_s, cpu_s = time.perf_counter(), self._cpu_s()
        work()
        speed = 1.0 if self._throttle_speed is None else self._throttle_speed
        if self._device_type != "cpu":
            torch.accelerator.synchronize()
            return (time.perf_counter() - wall_s) / speed
        if self._throttle_speed is not None:
            return (self._cpu_s() - cpu_s) / speed
        return time.perf_counter() - wall_s

    def _cpu_s(self) -> float:
        return time.thread_time() + self._elsewhere_cpu_s()

    def median(self, work: Callable[[], object], *, budget_s: float) -> float:
        """Median seconds of a call after one to warm up; more calls the less one takes, for about `budget_s` of CPU."""
        (median,) = self.medians(lambda: (self.seconds(work),), budget_s=budget_s)
        return median

    def medians(self, work: Callable[[], tuple[float, ...]], *, budget_s: float) -> tuple[float, ...]:
        """The same for work that times its own parts and returns their seconds."""
        work()
        start_s = time.thread_time()
        samples: list[tuple[float, ...]] = []
        while len(samples) < _LEAST_SAMPLES or (
            len(samples) < _MOST_SAMPLES and time.thread_time() - start_s < budget_s
        ):
            samples.append(work())
        return tuple(statistics.median(part) for part in zip(*samples, strict=True))


def fit_line(points: tuple[tuple[int, float], tuple[int, float]]) -> tuple[float, float]:
    """The line (fixed, per row) through two (rows, seconds) points, with neither part below zero.

    Where noise makes a part negative the other alone explains the larger measurement, which matters more.
    """
    (few, few_s), (many, many_s) = points
    per_row = max((many_s - few_s) / (many - few), 0.0)
    fixed = few_s - per_row * few
    if fixed < 0:
        return 0.0, many_s / many
    return fixed, per_row
