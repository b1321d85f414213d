import pytest

from coterie.measure import timing
from coterie.measure.timing import Stopwatch, fit_line


class Clocks:
    """Stands in for `time`: wall and CPU seconds of this thread, moved by the work that is timed."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def compute(self) -> None:
        self.wall_s += 2.0
        self.cpu_s += 2.0

    def wait(self) -> None:
        self.wall_s += 3.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(timing, "time", clocks)
    return clocks


def test_a_throttled_device_is_timed_by_its_cpu_time_over_its_speed(clocks: Clocks) -> None:
    assert Stopwatch(throttle_speed=0.25).seconds(clocks.compute) == 8.0


def test_what_backends_computed_meanwhile_counts_on_a_throttled_device(clocks: Clocks) -> None:
    assert Stopwatch(throttle_speed=0.25, elsewhere_cpu_s=lambda: clocks.wall_s).seconds(clocks.compute) == 16.0


def test_waiting_counts_on_a_free_device_and_not_on_a_throttled_one(clocks: Clocks) -> None:
    assert Stopwatch().seconds(clocks.wait) == 3.0
    assert Stopwatch(throttle_speed=0.5).seconds(clocks.wait) == 0.0


def test_an_accelerator_is_timed_until_it_has_finished_throttled_or_not(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing.torch.accelerator, "synchronize", clocks.wait)
    assert Stopwatch(device_type="cuda").seconds(clocks.compute) == 5.0
    assert Stopwatch(device_type="cuda", throttle_speed=0.25).seconds(clocks.compute) == 20.0


def test_samples_are_taken_for_the_budget_of_cpu_seconds_and_fifteen_at_most(clocks: Clocks) -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        clocks.compute()

    Stopwatch().median(work, budget_s=9.0)
    assert len(calls) == 6  # one to warm up
    Stopwatch().median(work, budget_s=1e6)
    assert len(calls) == 6 + 16


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
