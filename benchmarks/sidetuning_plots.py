"""Plots of a data set, after the paper's Figures 5 and 6 and its Table 9.

Time of a batch against network speed; quality against time and against device compute; quality by rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from sidetuning_costs import VariantRun, mean_curve

SPEEDS_MBIT = (10, 20, 50, 100, 200, 500, 1000)

# Okabe and Ito's palette: told apart with every common kind of color blindness.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A", "#000000")

_WIDEST, _NARROWER = 4.0, 0.45
"""Points: lines that lie on each other show, since later ones are narrower."""


def plot_speeds(name: str, runs: Mapping[str, Sequence[VariantRun]], path: Path) -> None:
    """Mean seconds of a batch over the run against the network's speed."""
    figure, (axes,) = _figure(1)
    for style, (variant, found) in zip(_styles(), runs.items(), strict=False):
        times = [found[0].batch_s(speed * 1e6) for speed in SPEEDS_MBIT]
        axes.plot(SPEEDS_MBIT, times, label=variant, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _label_plainly(axes.xaxis)
    axes.set_xlabel("network, Mbit/s")
    axes.set_ylabel("seconds of a batch, mean over the run")
    _finish(figure, axes, name, path)


def plot_quality(name: str, runs: Mapping[str, Sequence[VariantRun]], path: Path, *, mbit: float) -> None:
    """Mean quality after each epoch against time so far, and against the device's operations so far."""
    figure, (time_axes, compute_axes) = _figure(2)
    for style, (variant, found) in zip(_styles(), runs.items(), strict=False):
        curve, first = mean_curve(found), found[0]
        times = [first.seconds(mbit * 1e6, epoch + 1) for epoch in range(len(curve))]
        compute = [flops / 1e12 for flops in accumulate(cost.device_flops for cost in first.costs)]
        time_axes.plot(times, curve, label=variant, **style)
        compute_axes.plot(compute, curve, label=variant, **style)
    time_axes.set_xlabel(f"seconds at {mbit:g} Mbit/s")
    compute_axes.set_xlabel("device compute, TFLOP")
    for axes in (time_axes, compute_axes):
        axes.set_xscale("log")
        _label_plainly(axes.xaxis)
        axes.set_ylabel("quality, points")
    _finish(figure, time_axes, name, path)


def plot_ranks(name: str, qualities: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Mean quality at the end against the side network's rank, a line for each variant."""
    figure, (axes,) = _figure(1)
    for style, (variant, by_rank) in zip(_styles(), qualities.items(), strict=False):
        axes.plot(list(by_rank), list(by_rank.values()), label=variant, **style)
    ranks = sorted({rank for by_rank in qualities.values() for rank in by_rank})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("rank")
    axes.set_ylabel("quality, points")
    _finish(figure, axes, name, path)


def _styles() -> Iterator[dict[str, Any]]:
    for number, color in enumerate(_COLORS):
        yield {"color": color, "marker": ".", "linewidth": _WIDEST - number * _NARROWER}


def _label_plainly(axis: Any) -> None:
    """Numbers such as 0.5, 1, 2 instead of powers of ten, of which less than a decade would have too many or one."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _figure(columns: int) -> tuple[Any, Sequence[Any]]:
    # The object interface: pyplot would keep every figure alive and may want a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * columns, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _finish(figure: Any, axes: Any, name: str, path: Path) -> None:
    axes.set_title(name, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png")
