"""Timings of compute backends and their allocation as one PNG, after the paper's Figures 2 and 6."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import StorageError
from coterie.profiles.backend_profile import ShareTiming

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from coterie.api import BackendsProfile
    from coterie.planner.head_allocation import PartAllocation

# Okabe and Ito's palette: told apart with every common kind of color blindness.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#8A8A8A"


def plot_profile(found: "BackendsProfile", path: Path) -> None:
    """Draw seconds over counts for each backend, the shares chosen, and the prediction beside each backend alone.

    Raises:
        StorageError: The file cannot be written.
    """
    # The object interface: pyplot would keep every figure alive and may want a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    heads, neurons, bars = figure.subplots(1, 3)
    profile, allocation = found.profile, found.allocation
    _draw_timings(heads, {b.name: b.attention for b in profile.backends}, allocation.attention)
    heads.set_xlabel("KV groups")
    _draw_timings(neurons, {b.name: b.neurons for b in profile.backends}, allocation.neurons)
    neurons.set_xlabel("feed-forward neurons")
    _draw_bars(bars, found)
    heads.set_title(
        f"{Path(found.model).name}: {profile.rows} rows of {profile.tokens} tokens", loc="left", fontsize=10
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="choose a writable folder with free space by --plot",
        ) from error


def _draw_timings(axes: "Axes", columns: dict[str, Sequence[ShareTiming]], allocation: "PartAllocation | None") -> None:
    """Solid: all at once; dashed: head by head; a ring where the allocation lies."""
    chosen = {} if allocation is None else {share.backend: share for share in allocation.shares}
    for color, (name, timings) in zip(_cycle(len(columns)), columns.items(), strict=True):
        counts = [timing.count for timing in timings]
        axes.plot(counts, [t.fused_s * 1e3 for t in timings], color=color, marker=".", label=name)
        each = [(t.count, t.each_s * 1e3) for t in timings if t.each_s is not None]
        if each:
            axes.plot(*zip(*each, strict=True), color=color, linestyle="--", linewidth=1, label=f"{name}, head by head")
        if name in chosen:
            share = chosen[name]
            axes.plot([share.count], [share.predicted_s * 1e3], "o", color=color, markersize=11, fillstyle="none")
    if allocation is not None:
        axes.axhline(allocation.predicted_s * 1e3, color=_GREY, linewidth=1, linestyle=":", label="scheduler")
    _decorate(axes)
    compared = [timings[-1] for timings in columns.values() if timings and timings[-1].count == _largest(columns)]
    if compared:
        # One that was given up after its first share, a hundred times as slow, would press all others to the ground.
        axes.set_ylim(top=1.15e3 * max(max(timing.fused_s, timing.each_s or 0.0) for timing in compared) or None)
    if columns and any(columns.values()):
        axes.legend(frameon=False, fontsize=8)


def _largest(columns: dict[str, Sequence[ShareTiming]]) -> int:
    """The count that the whole part is: that of whoever was measured with most."""
    return max(timings[-1].count for timings in columns.values() if timings)


def _draw_bars(axes: "Axes", found: "BackendsProfile") -> None:
    """Each backend alone, then all by the allocation; heads below, neurons above."""
    groups, neurons = found.profile.groups, found.profile.neurons
    rows: list[tuple[str, float, float]] = []
    for backend in found.profile.backends:
        wholes = _whole(backend.attention, groups), _whole(backend.neurons, neurons)
        if None not in wholes:
            rows.append((backend.name, wholes[0] or 0.0, wholes[1] or 0.0))
    attention, feed_forward = found.allocation.attention, found.allocation.neurons
    together = [part.predicted_s if part is not None else 0.0 for part in (attention, feed_forward)]
    rows.append(("scheduler", together[0], together[1]))
    names = [name for name, _, _ in rows]
    below = [heads * 1e3 for _, heads, _ in rows]
    axes.bar(names, below, color=_COLORS[0], label="attention")
    axes.bar(names, [above * 1e3 for _, _, above in rows], bottom=below, color=_COLORS[4], label="feed-forward")
    _decorate(axes)
    axes.legend(frameon=False, fontsize=8)


def _whole(timings: Sequence[ShareTiming], total: int) -> float | None:
    """Seconds of the whole part; 0 if it is not split at all, None if this backend was not measured with it."""
    if not total:
        return 0.0
    return timings[-1].seconds if timings and timings[-1].count == total else None


def _cycle(count: int) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(count)]


def _decorate(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel("ms, forward and backward")
    axes.set_ylim(bottom=0)
