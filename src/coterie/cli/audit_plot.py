"""What can be read from each layer, as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import StorageError

if TYPE_CHECKING:
    from coterie.api.auditing import Audit
    from coterie.sidetuning.leakage import Hits

# Okabe and Ito's palette: told apart with every common kind of color blindness.
_BLUE, _RED, _GREY = "#0072B2", "#D55E00", "#8A8A8A"


def plot_audit(found: "Audit", path: Path) -> None:
    """Draw the shares of both attacks over the layers, and what guessing reaches.

    Raises:
        StorageError: The file cannot be written.
    """
    # The object interface: pyplot would keep every figure alive and may want a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    layers = found.tokens.layers
    numbers = [layer.layer for layer in layers]
    attacks = (
        ("nearest embedding", _BLUE, [layer.by_embedding for layer in layers]),
        ("nearest activation of one token", _RED, [layer.by_activation for layer in layers]),
    )
    for name, color, hits in attacks:
        axes.plot(numbers, _row_shares(hits), color=color, marker=".", label=f"{name}: one of the row's tokens")
        if any(hit is not None and hit.own is not None for hit in hits):
            own = _own_shares(hits)
            axes.plot(numbers, own, color=color, marker=".", linestyle="--", label=f"{name}: the very token")
    axes.axhline(
        found.tokens.guess.row,
        color=_GREY,
        linestyle=":",
        linewidth=1,
        label="one of the row's tokens, by always the same guess",
    )
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of activations that give away a token")
    axes.set_title(f"{Path(found.model).name}, {found.task}, {found.side.upload}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", color="#E4E4E4", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="choose a writable folder with free space by --plot",
        ) from error


def _row_shares(hits: "Sequence[Hits | None]") -> list[float]:
    return [float("nan") if hit is None else hit.row for hit in hits]


def _own_shares(hits: "Sequence[Hits | None]") -> list[float]:
    return [float("nan") if hit is None or hit.own is None else hit.own for hit in hits]
