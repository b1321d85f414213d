"""How often labels are right: accuracy, F1, Matthews' correlation, and a table per label, by scikit-learn.

scikit-learn is imported when figures are asked for, which only the coordinator does. Where a figure would divide by
zero it is 0.
"""

from collections.abc import Sequence

from coterie.tasks.examples import EncodedExample, Example, LabelledText, PredictedArray

MOST_LABELS_SHOWN = 40
"""Labels in the table for people; of more, those with the lowest F1 are shown."""

_Scores = dict[str, tuple[float, float, float, int]]
"""Precision, recall, F1 and rows by label."""


class LabelMetric:
    """Collects right and predicted labels of rows; rows without a right label are left out."""

    def __init__(self, labels: Sequence[str]) -> None:
        """`labels` by id; of two labels the second is the positive one, as in GLUE."""
        self._labels = tuple(labels)
        self._gold: list[str] = []
        self._predicted: list[str] = []

    def add(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> None:  # noqa: ARG002 - the label id says all
        """Count one row; `predicted` is a label id ()."""
        assert isinstance(example, LabelledText), "rows come from this task's own readers"
        if example.label is not None:
            self._gold.append(example.label)
            self._predicted.append(self._labels[int(predicted)])

    def result(self, mean_loss: float | None = None) -> dict[str, float]:  # noqa: ARG002 - no figure needs the loss
        """All figures: `accuracy`, `macro_f1` (over labels that occur), `matthews`, `binary_f1`, and F1 per label."""
        figures = {"accuracy": 0.0, "macro_f1": 0.0, "matthews": 0.0}
        if len(self._labels) == 2:
            figures["binary_f1"] = 0.0
        if self._gold:
            from sklearn import metrics  # noqa: PLC0415 - heavy, and no worker needs it

            scores = self._per_label()
            figures["accuracy"] = float(metrics.accuracy_score(self._gold, self._predicted))
            figures["macro_f1"] = float(metrics.f1_score(self._gold, self._predicted, average="macro", zero_division=0))
            if len({*self._gold, *self._predicted}) > 1:
                figures["matthews"] = float(metrics.matthews_corrcoef(self._gold, self._predicted))
            if len(self._labels) == 2 and self._labels[1] in scores:
                figures["binary_f1"] = scores[self._labels[1]][2]
            figures |= {f"f1/{label}": f1 for label, (_, _, f1, _) in scores.items()}
        return figures | {"rows": float(len(self._gold)), "rows_correct": float(self._correct)}

    def report(self, mean_loss: float | None = None) -> str:  # noqa: ARG002 - as above
        """A table per label, and what is peculiar about the figures."""
        if not self._gold:
            return "no row has a label to compare with"
        figures = self.result()
        scores = self._per_label()
        shown = sorted(scores, key=lambda label: (scores[label][2], label))[:MOST_LABELS_SHOWN]
        shown = [label for label in scores if label in set(shown)]
        width = max(len("mean of labels (macro)"), *(len(label) for label in shown))
        lines = [f"{'label':<{width}}  precision  recall     F1  rows"]
        for label in shown:
            precision, recall, f1, rows = scores[label]
            lines.append(f"{label:<{width}}  {precision:>9.1%}  {recall:>6.1%}  {f1:>5.1%}  {rows:>4}")
        if len(shown) < len(scores):
            lines.append(f"(the {len(shown)} labels with the lowest F1 of {len(scores)})")
        lines.append(f"{'mean of labels (macro)':<{width}}  {'':>9}  {'':>6}  {figures['macro_f1']:>5.1%}  {'':>4}")
        if len(self._labels) == 2:
            lines.append(f"F1 of {self._labels[1]!r} (label 1): {figures['binary_f1']:.1%}")
        lines.append(f"Matthews' correlation {figures['matthews']:.3f}")
        if len(set(self._predicted)) == 1:
            lines.append(f"every row is predicted as {self._predicted[0]!r}: the correlation is set to 0")
        lines.append(f"{self._correct} of {len(self._gold)} rows right")
        return "\n".join(lines)

    @property
    def _correct(self) -> int:
        return sum(one == other for one, other in zip(self._gold, self._predicted, strict=True))

    def _per_label(self) -> _Scores:
        """Of the labels that occur, right or predicted, in the order of their ids, unknown ones last."""
        from sklearn import metrics  # noqa: PLC0415 - as above

        order = {label: index for index, label in enumerate(self._labels)}
        found = sorted({*self._gold, *self._predicted}, key=lambda label: (order.get(label, len(order)), label))
        columns = metrics.precision_recall_fscore_support(self._gold, self._predicted, labels=found, zero_division=0)
        return {
            label: (float(precision), float(recall), float(f1), int(rows))
            for label, precision, recall, f1, rows in zip(found, *columns, strict=True)
        }
