"""Loss and throughput of a run as one PNG."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import StorageError
from coterie.metrics.events import valid_evaluations, valid_steps
from coterie.metrics.records import AnyRecord, EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "training.png"
"""Name of the plot in a run folder."""

# Okabe and Ito's palette: told apart with every common kind of color blindness, and by lightness in print.
_BLUE = "#0072B2"
_ORANGE = "#D55E00"
_GREEN = "#009E73"
_GREY = "#8A8A8A"
_MEAN_STEPS = 20
_LABELED_EPOCHS = 8


def plot_run(records: Sequence[AnyRecord], path: Path, *, title: str = "") -> bool:
    """Draw loss and tokens per second over optimizer steps; False if no step has been recorded.

    Raises:
        StorageError: The file cannot be written.
    """
    steps = valid_steps(records)
    if not steps:
        return False
    # The object interface: pyplot would keep every figure alive and may want a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_loss(upper, steps, valid_evaluations(records))
    _draw_throughput(lower, steps)
    _decorate(upper, steps, name_epochs=True)
    _decorate(lower, steps, name_epochs=False)
    if title:
        upper.set_title(title, loc="left", fontsize=11)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="choose a writable folder with free space by --output",
        ) from error
    return True


def _draw_loss(axes: "Axes", steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> None:
    numbers = [step.step + 1 for step in steps]
    losses = [float("nan") if step.loss is None else step.loss for step in steps]
    if len(steps) > 2 * _MEAN_STEPS:
        axes.plot(numbers, losses, color=_BLUE, alpha=0.3, linewidth=0.9, label="training, each step")
        axes.plot(
            numbers, _running_mean(losses), color=_BLUE, linewidth=2, label=f"training, mean of {_MEAN_STEPS} steps"
        )
    else:
        axes.plot(numbers, losses, color=_BLUE, linewidth=1.6, marker=".", markersize=4, label="training, each step")
    for split, color, marker in (("dev", _ORANGE, "o"), ("test", _GREEN, "s")):
        points = [
            (record.step, record.loss) for record in evaluations if record.split == split and record.loss is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=color, marker=marker, linestyle="--", linewidth=1.2, label=split
            )
    axes.set_ylabel("loss (nats per labeled token)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def _draw_throughput(axes: "Axes", steps: Sequence[StepRecord]) -> None:
    timed = [step for step in steps if step.seconds > 0]
    rates = [step.tokens / step.seconds for step in timed]
    numbers = [step.step + 1 for step in timed]
    many = len(timed) > 2 * _MEAN_STEPS
    axes.plot(numbers, rates, color=_GREEN, alpha=0.3 if many else 1, linewidth=0.9 if many else 1.6, label="each step")
    if many:
        axes.plot(numbers, _running_mean(rates), color=_GREEN, linewidth=2, label=f"mean of {_MEAN_STEPS} steps")
    if timed:
        mean = sum(step.tokens for step in timed) / sum(step.seconds for step in timed)
        axes.axhline(mean, color=_GREY, linewidth=1, linestyle=":", label=f"whole run: {mean:,.0f}")
    axes.set_ylabel("tokens per second")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right", fontsize=9, ncols=3)


def _decorate(axes: "Axes", steps: Sequence[StepRecord], *, name_epochs: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", integer=True)
    starts = [after for before, after in itertools.pairwise(steps) if after.epoch != before.epoch]
    for step in starts:
        axes.axvline(step.step + 0.5, color=_GREY, linewidth=0.8, alpha=0.5)
        if name_epochs and len(starts) <= _LABELED_EPOCHS:
            place = axes.get_xaxis_transform()
            axes.text(
                step.step + 0.5, 0.99, f" epoch {step.epoch + 1}", transform=place, color=_GREY, fontsize=8, va="top"
            )


def _running_mean(values: Sequence[float]) -> list[float]:
    """The mean of the `_MEAN_STEPS` values around each value: centered, so that the curve does not lag behind."""
    half = _MEAN_STEPS // 2
    means = []
    for index in range(len(values)):
        window = [value for value in values[max(0, index - half) : index + half] if not math.isnan(value)]
        means.append(sum(window) / len(window) if window else float("nan"))
    return means
