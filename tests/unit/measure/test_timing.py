import time

import pytest

from coterie.measure.timing import Stopwatch, fit_line


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_throttled_device_is_timed_by_its_cpu_time_over_its_speed() -> None:
    assert 0.08 <= Stopwatch(throttle_speed=0.25).seconds(lambda: spin(0.02)) < 0.3


def test_waiting_counts_on_a_free_device_and_not_on_a_throttled_one() -> None:
    def wait() -> None:
        time.sleep(0.2)

    assert Stopwatch().seconds(wait) >= 0.2
    assert Stopwatch(throttle_speed=0.5).seconds(wait) < 0.2


def test_the_median_ignores_the_warm_up_and_one_slow_call() -> None:
    calls = iter([9.0, 1.0, 7.0, 1.2, 1.1, *[1.1] * 20])
    (median,) = Stopwatch().medians(lambda: (next(calls),), budget_s=10.0)
    assert median == pytest.approx(1.1)


def test_three_samples_are_taken_even_without_budget() -> None:
    calls: list[int] = []
    Stopwatch().median(lambda: calls.append(1), budget_s=0.0)
    assert len(calls) == 4  # one to warm up


@pytest.mark.parametrize(
    ("points", "line"),
    [
        (((1, 3.0), (4, 9.0)), (1.0, 2.0)),
        (((1, 1.0), (4, 10.0)), (0.0, 2.5)),  # a negative fixed part
        (((1, 5.0), (4, 4.0)), (5.0, 0.0)),  # a negative slope
    ],
)
def test_a_line_through_two_points_never_goes_below_zero(
    points: tuple[tuple[int, float], tuple[int, float]], line: tuple[float, float]
) -> None:
    assert fit_line(points) == pytest.approx(line)
