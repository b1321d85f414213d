import pytest

from coterie.clock import FakeClock
from coterie.pipeline.throttle import Throttle, finish_of


def _throttle(speed: float, clock: FakeClock, oversleep_s: float = 0.0) -> tuple[Throttle, list[float]]:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds + oversleep_s)

    return Throttle(speed, sleep=sleep), slept


def test_a_quarter_speed_device_sleeps_three_times_its_cpu_time() -> None:
    clock = FakeClock()
    throttle, slept = _throttle(0.25, clock)
    throttle.settle(wall_s=1.0, cpu_s=1.0, now=clock.now)
    assert slept == [pytest.approx(3.0)]


def test_time_lost_to_a_busy_host_counts_as_part_of_the_slowness() -> None:
    clock = FakeClock()
    throttle, slept = _throttle(0.5, clock)
    throttle.settle(wall_s=1.5, cpu_s=1.0, now=clock.now)
    throttle.settle(wall_s=2.5, cpu_s=1.0, now=clock.now)
    assert slept == [pytest.approx(0.5)]


def test_what_a_sleep_overshoots_is_taken_off_the_next() -> None:
    clock = FakeClock()
    throttle, slept = _throttle(0.5, clock, oversleep_s=0.01)
    for _ in range(3):
        throttle.settle(wall_s=1.0, cpu_s=1.0, now=clock.now)
    assert slept == [pytest.approx(1.0), pytest.approx(0.99), pytest.approx(0.99)]


def test_full_speed_never_sleeps() -> None:
    clock = FakeClock()
    throttle, slept = _throttle(1.0, clock)
    throttle.settle(wall_s=1.0, cpu_s=1.0, now=clock.now)
    assert slept == []


def test_the_speed_may_change_while_it_runs_and_full_speed_ignores_backends_beside_the_thread() -> None:
    clock = FakeClock()
    throttle, slept = _throttle(1.0, clock)
    throttle.settle(wall_s=1.0, cpu_s=3.0, now=clock.now)
    assert slept == []
    throttle.speed = 0.25
    throttle.settle(wall_s=1.0, cpu_s=1.0, now=clock.now)
    throttle.speed = 0.5
    throttle.settle(wall_s=1.0, cpu_s=1.0, now=clock.now)
    assert (throttle.speed, slept) == (0.5, [pytest.approx(3.0), pytest.approx(1.0)])


def test_on_an_accelerator_the_time_until_it_has_finished_counts_and_not_the_threads() -> None:
    clock, slept = FakeClock(), list[float]()

    def finish() -> None:
        clock.advance(0.9)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    throttle = Throttle(0.25, finish=finish, sleep=sleep)
    throttle.settle(wall_s=0.1, cpu_s=0.1, now=clock.now)
    assert slept == pytest.approx([3.0]), "a second of its time in four"


def test_nobody_waits_for_an_accelerator_that_is_not_throttled() -> None:
    waited: list[int] = []
    Throttle(1.0, finish=lambda: waited.append(1)).settle(wall_s=0.1, cpu_s=0.1, now=FakeClock().now)
    assert waited == []


def test_only_an_accelerator_is_waited_for() -> None:
    assert finish_of("cpu") is None
    assert finish_of("cuda") is not None
