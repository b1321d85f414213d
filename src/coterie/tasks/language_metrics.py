"""Figures of causal models: perplexity and token accuracy of given texts, ROUGE of generated answers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from coterie.tasks.examples import IGNORED_LABEL, EncodedExample, Example, PredictedArray

_LARGEST_LOSS = 700.0
"""Of larger ones the exponential is no float any more."""

ROUGE_SHARES = ("rouge_1", "rouge_2", "rouge_l")
_KINDS: Mapping[str, str] = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}


class LanguageMetric:
    """Perplexity, and how many tokens the model would have written as they are, each after the right ones before."""

    def __init__(self) -> None:
        self._tokens = 0
        self._right = 0

    def add(self, example: Example, encoded: EncodedExample, predicted: PredictedArray) -> None:  # noqa: ARG002 - as Metric
        """Count one row."""
        labelled = encoded.labels != IGNORED_LABEL
        self._tokens += int(labelled.sum())
        self._right += int((predicted[: encoded.tokens] == encoded.labels)[labelled].sum())

    def result(self, mean_loss: float | None = None) -> dict[str, float]:
        """`perplexity`, `token_accuracy`, `tokens`; 0 where there is no token to learn."""
        return {
            "perplexity": math.exp(min(mean_loss, _LARGEST_LOSS)) if mean_loss is not None else 0.0,
            "token_accuracy": self._right / self._tokens if self._tokens else 0.0,
            "tokens": float(self._tokens),
        }

    def report(self, mean_loss: float | None = None) -> str:
        """Both figures in a line each."""
        figures = self.result(mean_loss)
        return (
            f"perplexity {figures['perplexity']:.4g} over {self._tokens} tokens\n"
            f"{self._right} of {self._tokens} tokens right ({figures['token_accuracy']:.1%})"
        )


class RougeMetric:
    """ROUGE-1, -2 and -L (F1, words stemmed) of generated answers, by the package `rouge-score`; the mean over rows.

    Of several right answers the nearest counts. Rows without a right answer are left out.
    """

    main_metric = "rouge_l"
    shares = (*ROUGE_SHARES, "exact_match")

    def __init__(self, right_answers: Callable[[Example], tuple[str, ...]]) -> None:
        """`right_answers` gives a row's own answers, or of an answered row the one answer."""
        from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 - slow to import; workers never need it

        self._scorer: Any = RougeScorer(list(_KINDS.values()), use_stemmer=True)
        self._right_answers = right_answers
        self._sums = dict.fromkeys(self.shares, 0.0)
        self._rows = 0
        self._left_out = 0

    def add(self, gold: Example, answered: Example) -> None:
        """Compare one row."""
        right, generated = self._right_answers(gold), self._right_answers(answered)
        if not right:
            self._left_out += 1
            return
        answer = generated[0] if generated else ""
        self._rows += 1
        scores = self._scorer.score_multi(list(right), answer)
        for name, kind in _KINDS.items():
            self._sums[name] += float(scores[kind].fmeasure)
        self._sums["exact_match"] += float(any(answer.strip() == text.strip() for text in right))

    def result(self) -> dict[str, float]:
        """`rouge_1`, `rouge_2`, `rouge_l`, `exact_match`, and `answers`, how many were compared."""
        shares = {name: total / self._rows if self._rows else 0.0 for name, total in self._sums.items()}
        return {**shares, "answers": float(self._rows)}

    def report(self) -> str:
        """The figures in a line, and rows that had nothing to compare with."""
        figures = self.result()
        line = (
            f"{self._rows} answers: ROUGE-1 {figures['rouge_1']:.1%}, ROUGE-2 {figures['rouge_2']:.1%}, "
            f"ROUGE-L {figures['rouge_l']:.1%}, exactly right {figures['exact_match']:.1%}"
        )
        return f"{line}\n{self._left_out} rows have no answer to compare with" if self._left_out else line
