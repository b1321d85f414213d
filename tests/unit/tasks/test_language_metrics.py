import math

import numpy as np
import pytest

from coterie.tasks.examples import EncodedExample, Example
from coterie.tasks.language_metrics import LanguageMetric, RougeMetric
from coterie.tasks.language_rows import Instruction, TextDocument


def encoded(labels: list[int]) -> EncodedExample:
    return EncodedExample(input_ids=np.zeros(len(labels), dtype=np.int64), labels=np.array(labels))


def test_token_accuracy_counts_learnt_tokens_and_leaves_padding_out() -> None:
    metric = LanguageMetric()
    metric.add(TextDocument(text=""), encoded([5, -100, 7, 8]), np.array([5, 6, 7, 0, 8, 8]))
    metric.add(TextDocument(text=""), encoded([9]), np.array([9]))

    figures = metric.result(math.log(12.0))

    assert figures["tokens"] == 4
    assert figures["token_accuracy"] == 0.75
    assert figures["perplexity"] == pytest.approx(12.0)
    assert "perplexity 12 over 4 tokens" in metric.report(math.log(12.0))


def test_without_learnt_tokens_all_figures_are_zero() -> None:
    assert LanguageMetric().result(None) == {"perplexity": 0.0, "token_accuracy": 0.0, "tokens": 0.0}


def test_a_loss_beyond_all_bounds_still_gives_a_number() -> None:
    assert math.isfinite(LanguageMetric().result(5000.0)["perplexity"])


def test_rows_without_an_answer_of_their_own_are_left_out_of_rouge() -> None:
    def answers(example: Example) -> tuple[str, ...]:
        assert isinstance(example, Instruction)
        return () if example.answer is None else (example.answer,)

    metric = RougeMetric(answers)
    metric.add(Instruction(text="q"), Instruction(text="q", answer="x"))
    metric.add(Instruction(text="q", answer="the cats"), Instruction(text="q", answer="The cat"))

    assert metric.result()["answers"] == 1
    assert metric.result()["rouge_l"] == 1.0
    assert metric.result()["exact_match"] == 0.0
    assert "1 rows have no answer to compare with" in metric.report()
    assert RougeMetric(answers).result()["rouge_l"] == 0.0
