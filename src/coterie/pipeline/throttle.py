"""Emulates a slower device inside the process: sleeps so that wall time = busy time / speed."""

import time
from collections.abc import Callable

import torch

_LONGEST_CREDIT_S = 0.05


class Throttle:
    """Makes the compute thread take 1 / `speed` times its CPU time, without root and within a few per cent.

    Applied after every action and before its result is sent, so that neighbours see the slower device too. It counts
    the compute thread only: run it with one torch thread. On an accelerator, which computes while that thread has
    nothing to do, the time until it has finished counts instead.
    """

    def __init__(
        self,
        speed: float,
        *,
        finish: Callable[[], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take `speed` as a fraction of this machine's core or accelerator, in (0, 1]; at 1 nothing is slowed.

        `finish` waits until an accelerator has done all that it was told to; None: there is none.
        """
        self.speed = speed
        self._finish = finish
        self._sleep = sleep
        self._credit_s = 0.0

    @property
    def speed(self) -> float:
        """May be set from another thread at any time; it holds from the next action's end on."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        assert 0 < speed <= 1
        self._speed = speed

    def settle(self, *, wall_s: float, cpu_s: float, now: Callable[[], float]) -> None:
        """Sleep for what an action of `cpu_s` that took `wall_s` lacks; what a sleep overshoots is credited."""
        speed = self._speed
        if speed == 1:  # backends beside the compute thread may take more CPU time than wall time passes
            return
        busy_s = cpu_s
        if self._finish is not None:
            end_s = now()
            self._finish()
            wall_s += now() - end_s
            busy_s = wall_s
        rest_s = busy_s / speed - wall_s - self._credit_s
        if rest_s <= 0:
            self._credit_s = min(-rest_s, self._credit_s)
            return
        start_s = now()
        self._sleep(rest_s)
        self._credit_s = min(max(now() - start_s - rest_s, 0.0), _LONGEST_CREDIT_S)


def finish_of(device_type: str) -> Callable[[], None] | None:
    """What waits for such a device; None for the processor, which nobody waits for."""
    return None if device_type == "cpu" else torch.accelerator.synchronize
