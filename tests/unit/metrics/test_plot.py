"""The plot: a PNG with both curves; nothing to draw is said, not drawn."""

import pytest

from coterie.errors import StorageError
from coterie.metrics import plot
from coterie.metrics.records import StartRecord, StepRecord


def step(number: int, loss: float | None) -> StepRecord:
    return StepRecord(
        step=number, epoch=number // 3, loss=loss, tokens=9, loss_tokens=1, seconds=0.1, learning_rate=0.1
    )


def test_a_run_is_drawn_as_a_png_without_a_screen(tmp_path, records):
    assert plot.plot_run(records, tmp_path / "training.png", title="m on wikigold")
    content = (tmp_path / "training.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000


@pytest.mark.parametrize("losses", [[1.0], [None, None], [2.0, None, 1.0], [3.0 - 0.01 * step for step in range(200)]])
def test_short_long_and_broken_runs_are_drawn(tmp_path, losses):
    assert plot.plot_run([step(number, loss) for number, loss in enumerate(losses)], tmp_path / "training.png")


def test_a_step_without_time_does_not_divide_by_zero(tmp_path):
    record = StepRecord(step=0, epoch=0, loss=1.0, tokens=9, loss_tokens=1, seconds=0.0, learning_rate=0.1)
    assert plot.plot_run([record], tmp_path / "training.png")


def test_a_run_without_steps_draws_nothing(tmp_path):
    start = StartRecord(run="r", package_version="0", model="m", total_steps=1, steps_per_epoch=1)
    assert not plot.plot_run([start], tmp_path / "training.png")
    assert not (tmp_path / "training.png").exists()


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot write"):
        plot.plot_run([step(0, 1.0)], tmp_path / "absent" / "training.png")


def test_the_running_mean_is_centered_and_skips_what_is_not_a_number():
    assert plot._running_mean([1.0] * 30) == [1.0] * 30
    assert plot._running_mean([float("nan"), 2.0]) == [2.0, 2.0]
    ramp = [float(value) for value in range(100)]
    assert plot._running_mean(ramp)[50] == pytest.approx(49.5)
