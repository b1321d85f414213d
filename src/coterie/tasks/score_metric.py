"""How near predicted scores are: Pearson's and Spearman's correlation by scipy, and the mean errors.

scipy is imported when figures are asked for, which only the coordinator does. A correlation with scores that are all
equal has no value: it is set to 0, and the report says so.
"""

import numpy as np
import numpy.typing as npt

from coterie.tasks.examples import EncodedExample, Example, PredictedArray, ScoredText

_Floats = npt.NDArray[np.float64]


class ScoreMetric:
    """Collects right and predicted scores of rows; rows without a right score are left out."""

    def __init__(self) -> None:
        self._gold: list[float] = []
        self._predicted: list[float] = []

    def add(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> None:  # noqa: ARG002 - the score says all
        """Count one row; `predicted` is a score ()."""
        assert isinstance(example, ScoredText), "rows come from this task's own readers"
        if example.score is not None:
            self._gold.append(example.score)
            self._predicted.append(float(predicted))

    def result(self, mean_loss: float | None = None) -> dict[str, float]:  # noqa: ARG002 - the errors are counted here
        """All figures: `spearman`, `pearson`, `mean_squared_error`, `mean_absolute_error`, `rows`."""
        gold, predicted = self._arrays()
        figures = {"spearman": 0.0, "pearson": 0.0, "mean_squared_error": 0.0, "mean_absolute_error": 0.0}
        if len(gold):
            errors = predicted - gold
            figures["mean_squared_error"] = float(np.mean(errors**2))
            figures["mean_absolute_error"] = float(np.mean(np.abs(errors)))
        if self._constant() is None:
            from scipy import stats  # noqa: PLC0415 - heavy, and no worker needs it

            figures["spearman"] = float(stats.spearmanr(gold, predicted).statistic)
            figures["pearson"] = float(stats.pearsonr(gold, predicted).statistic)
        return figures | {"rows": float(len(gold))}

    def report(self, mean_loss: float | None = None) -> str:  # noqa: ARG002 - as above
        """The figures, and the ranges of the scores."""
        if not self._gold:
            return "no row has a score to compare with"
        figures = self.result()
        gold, predicted = self._arrays()
        absolute, squared = figures["mean_absolute_error"], figures["mean_squared_error"]
        reached = f"predicted from {predicted.min():.4g} to {predicted.max():.4g}"
        lines = [
            f"Spearman's correlation {figures['spearman']:.3f}, Pearson's {figures['pearson']:.3f}",
            f"mean absolute error {absolute:.4g}, mean squared error {squared:.4g}",
            f"scores from {gold.min():.4g} to {gold.max():.4g}, {reached}; {len(gold)} rows",
        ]
        constant = self._constant()
        if constant is not None:
            lines.append(f"{constant}: the correlations are set to 0")
        return "\n".join(lines)

    def _arrays(self) -> tuple[_Floats, _Floats]:
        return np.array(self._gold, dtype=np.float64), np.array(self._predicted, dtype=np.float64)

    def _constant(self) -> str | None:
        """Why there is no correlation, if there is none."""
        gold, predicted = self._arrays()
        if len(gold) < 2:
            return "there are not two rows with a score"
        if np.ptp(predicted) == 0:
            return f"every row is predicted as {predicted[0]:.4g}"
        return f"every row has the score {gold[0]:.4g}" if np.ptp(gold) == 0 else None
